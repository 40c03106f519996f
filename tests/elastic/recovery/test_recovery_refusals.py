"""What cannot be recovered within the process, and is said before the training begins."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from needs import needs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lightning_dist
from lightning_dist import CommProfiler, compress_ddp, local_updates
from lightning_dist.base.features import RECOVERY
from lightning_dist.elastic.loop.objects import Objects
from lightning_dist.elastic.loop.user_loop import UserLoop
from lightning_dist.elastic.recovery.generations import Generations, is_alone
from lightning_dist.elastic.recovery.local_steps import require_recoverable_updates
from lightning_dist.elastic.recovery.regroup import require_recoverable
from lightning_dist.elastic.recovery.step import StepRecovery
from lightning_dist.elastic.session import ElasticSession
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.settings.run import RecoverySettings, RunSettings

pytestmark = needs(RECOVERY)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    if dist.is_initialized():  # of a Trainer of another test in this process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(**ddp: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(8, 8), **ddp)


def compressed(
    codec: str = "int8", *, ddp: dict[str, Any] | None = None, **settings: Any
) -> DistributedDataParallel:
    model = wrapped(**(ddp or {}))
    model.keeps = compress_ddp(model, codec, compile_kernels=False, **settings)  # nobody else does
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (wrapped, r"needs the hook of compress_ddp.*call compress_ddp\(model, codec\) before"),
        (
            lambda: compressed(ddp={"static_graph": True}),
            "without static_graph and find_unused_parameters",
        ),
        (
            lambda: compressed(ddp={"find_unused_parameters": True}),
            "without static_graph and find_unused",
        ),
        (lambda: compressed(ranks_per_node=1), "ranks_per_node and rank_groups name ranks"),
    ],
)
def test_models(make: Any, says: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=says):
        require_recoverable(model)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "streaming", "overlap_steps": 2}, "got overlap_steps=2; set it to 0"),
        ({"method": "post_local_sgd", "ddp_steps": 5}, "got ddp_steps=5; set it to 0"),
        ({"ranks_per_node": 1}, "ranks_per_node and rank_groups name ranks"),
        ({"ddp": True}, "and not in DistributedDataParallel, which communicates in its forward"),
    ],
)
def test_local_updates(given: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wraps = not given.keys().isdisjoint({"ddp", "ddp_steps"})
    given = {name: value for name, value in given.items() if name != "ddp"}
    synced = DistributedDataParallel(model) if wraps else model
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"fragments": 2} if given.get("method") == "streaming" else {}
    updates = local_updates(synced, sgd, **settings, **given)
    with pytest.raises(ValueError, match=says):
        require_recoverable_updates(updates)


def test_local_updates_on_a_device() -> None:
    model = nn.Linear(8, 8)
    updates = local_updates(model, torch.optim.SGD(model.parameters(), lr=0.1))
    device = torch.device("cuda", 0)
    updates.reducer.network = replace(updates.reducer.network, device=device)
    with pytest.raises(ValueError, match="models on the CPU, got one on cuda:0"):
        require_recoverable_updates(updates)


def test_a_loop_of_several_models_or_copies_of_residuals_of_workers() -> None:
    model = nn.Linear(8, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = local_updates(model, sgd)
    both = {"model": model, "other": wrapped(), "updates": updates}
    with pytest.raises(ValueError, match="got 1 in DistributedDataParallel and 1 with local upd"):
        Objects(both, world_size=1).to_recover()
    session = ElasticSession(RunSettings("unused"))
    given: dict[str, Any] = {"accumulate": 1, "signals": ()}
    mirrored = RecoverySettings(recovery="in_process", mirror_residuals=True)
    loop = UserLoop(session, recovering=mirrored, **given)
    loop._loader = DataLoader([torch.ones(8)])
    with pytest.raises(ValueError, match="here workers take local steps; leave it out"):
        loop._recovery_of(updates, cast("Generations", SimpleNamespace()))


def recovery(model: DistributedDataParallel, **given: Any) -> StepRecovery:
    generations = cast("Generations", SimpleNamespace())
    nothing: dict[str, Any] = {"optimizers": [], "objects": {}, "script": {}}
    return StepRecovery(generations, model, steps=lambda: 0, **nothing, **given)


def test_a_model_on_a_device_that_the_group_does_not_exchange() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    compress_ddp(model, "int8")
    model.device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"on cuda:0 needs a process group of a backend for it"):
        require_recoverable(model)


def test_a_grad_scaler_that_is_not_in_the_state() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="give the GradScaler to ElasticLoop in state="):
        recovery(compressed(grad_scaler=scaler))


def test_copies_of_residuals_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="mirror_residuals has nothing to copy: codec none"):
        recovery(compressed(codec="none"), mirror_every=1)


def test_a_profile_of_a_process_that_has_not_met_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = compressed()
    monkeypatch.setenv("LIGHTNING_DIST_RECOVERY_STORE", "localhost:1")
    assert not is_alone()  # a launch of one process has nobody to meet
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="enter CommProfiler inside of `with ElasticLoop"):
        CommProfiler(model, dirpath=tmp_path).__enter__()
    assert not [*tmp_path.iterdir()]


class Small(pl.LightningModule):
    """A module with as many parts as a refusal is about."""

    def __init__(self, kind: str = "SGD") -> None:
        super().__init__()
        self.net, self.kind = torch.nn.Linear(2, 1), kind
        self.automatic_optimization = kind != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        name = "SGD" if self.kind == "manual" else self.kind
        return getattr(torch.optim, name)(self.parameters(), lr=0.1)


def fit(module: pl.LightningModule, *callbacks: pl.Callback, loader: Any = None) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="compressed_ddp_elastic",
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader or DataLoader(torch.ones(4, 2)))


def test_it_needs_elastic_restart() -> None:
    with pytest.raises(ValueError, match=r"needs ElasticRestart\(\.\.\.\) among the callbacks"):
        fit(Small())


@pytest.mark.parametrize(
    ("kind", "callbacks", "format", "message"),
    [
        ("manual", [], "single", "automatic_optimization=False"),
        ("LBFGS", [], "single", "LBFGS"),
        ("SGD", ["AsyncCheckpoint"], "single", "a checkpoint with format='sharded'"),
        ("SGD", [], "sharded", "format='single'"),
    ],
)
def test_what_it_cannot_take_again_is_refused(
    kind: str, callbacks: list[str], format: Any, message: str, tmp_path: Path
) -> None:
    """Where no launcher is that replaces ranks too."""
    elastic = lightning_dist.ElasticRestart(tmp_path / "ckpt", format=format)
    others = [getattr(lightning_dist, name)(tmp_path, format="sharded") for name in callbacks]
    with pytest.raises(ValueError, match=message):
        fit(Small(kind), elastic, *others)  # a module in a parameter would keep its groups


OF_LEVELS = ({"hierarchical": True}, {"codec": {"intra": "bf16", "inter": "int8"}})


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (lightning_dist.CompressedDDPStrategy, {"delay": 1}, r"repeats a failed step.*delay=1"),
        *(
            (
                lightning_dist.CompressedDDPStrategy,
                {"mirror_residuals": True, **levels},
                "mirror_residuals copies the residual of each rank",
            )
            for levels in OF_LEVELS
        ),
        *(
            (kind, {}, r"ElasticLoop\(recovery='in_process'\)")
            for kind in (FabricStrategy, lightning_dist.LocalUpdateStrategy)
        ),
    ],
)
def test_strategies(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(recovery="in_process", **given)


@pytest.mark.parametrize("levels", OF_LEVELS)
def test_a_hierarchical_exchange_may_recover(levels: dict[str, Any]) -> None:
    lightning_dist.CompressedDDPStrategy(recovery="in_process", **levels)
