"""`CompressedDDPPlugin` on two ranks: training, settings of DDP, trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import of_all, require_compressed, require_equal, require_replicas
from wandb_runs import config, history

pytest.importorskip("accelerate")

import accelerate
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs
from scenarios.accelerating import Facts, Run, forget_accelerators
from scenarios.models import WIDTH
from torch import nn

from lightning_dist import OneBitAdam
from lightning_dist.accelerate import CompressedDDPPlugin

WEIGHT, BIAS = 16 * 256, 256  # elements; the bias stays uncompressed
INT8 = CompressedDDPPlugin("int8")
pytestmark = pytest.mark.on_ranks(2)


def trained(plugin: CompressedDDPPlugin | None = INT8, **given: Any) -> Facts:
    with Run(plugin, **given) as run:
        run.train(8)
        return run.facts()


def test_replicas_train_with_the_bytes_of_int8() -> None:
    """Attached by hand or in kwargs_handlers."""
    of_ddp, of_none = trained(None), trained(CompressedDDPPlugin("none"))
    by_hand, given = trained(), trained(by_hand=False)
    require_equal(of_none["parameters"], of_ddp["parameters"])
    require_equal(given["parameters"], by_hand["parameters"])
    stats = by_hand["stats"]
    assert stats["raw_bytes"] == 8 * 4 * (2 * WEIGHT + BIAS)
    assert stats["per_codec"]["int8"]["wire_bytes"] == 8 * 2 * (WEIGHT + 16 * 2)
    for name, value in of_ddp["parameters"].items():
        torch.testing.assert_close(by_hand["parameters"][name], value, rtol=0, atol=1e-2)
    for each in (by_hand, given):
        require_compressed(each, steps=8)


@pytest.mark.parametrize(
    ("given", "steps"),
    [({"gradient_accumulation_steps": 2}, 4), ({"mixed_precision": "bf16"}, 8)],
    ids=["accumulated", "bf16"],
)
def test_there_is_an_exchange_in_every_step(given: dict[str, Any], steps: int) -> None:
    require_compressed(trained(**given), steps=steps)


def test_residuals_are_unscaled() -> None:
    """A GradScaler whose scale doubles at every step gives the bits of a constant one."""
    found = []
    for growth_interval, scale in ((1000, 2.0**10), (1, 2.0**18)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
        found.append(trained(scaler=scaler))
        assert scaler.get_scale() == scale
    constant, growing = found
    require_equal(growing["residuals"], constant["residuals"])
    require_equal(growing["parameters"], constant["parameters"])
    require_compressed(growing, steps=8)


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_users_arguments_of_ddp_stay(by_hand: bool) -> None:
    given = DistributedDataParallelKwargs(
        find_unused_parameters=True, bucket_cap_mb=1, gradient_as_bucket_view=True
    )
    with Run(handlers=[given], by_hand=by_hand) as run:
        run.train(2)
        (model,) = run.models
        assert model.find_unused_parameters
        assert model.gradient_as_bucket_view
        assert model.bucket_bytes_cap == 1 << 20
        assert len(model._comm_hooks) == 1


def test_optimizers_are_connected() -> None:
    def onebit(parameters: Any, lr: float) -> OneBitAdam:
        return OneBitAdam(parameters, lr=0.01, freeze_step=2)

    def momentum(parameters: Any, lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    refused = "codec 'dgc' gives the gradients momentum, and SGD has its own"
    with pytest.raises(ValueError, match=refused):
        Run(CompressedDDPPlugin("dgc"), by_hand=False, optimizer=momentum)
    with Run(CompressedDDPPlugin("sign"), by_hand=False, optimizer=onebit) as run:
        assert run.compression.reducers[0].adjustment is run.optimizers[0].optimizer
        run.train(4)
        require_replicas(run.facts())


def test_a_model_may_be_prepared_again() -> None:
    with Run(by_hand=False) as run:
        run.train(1)
        (first,) = run.compression.reducers
        (model,), (optimizer,) = run.models, run.optimizers
        plain = run.accelerator.unwrap_model(model)
        run.accelerator.free_memory()
        run.models = [run.accelerator.prepare(plain)]
        run.optimizers = [run.accelerator.prepare(optimizer.optimizer)]
        run.train(2)
        assert first.closed
        found = run.facts()
    require_compressed(found, steps=2)


def test_several_processes_that_would_train_for_themselves() -> None:
    """On CPU without ACCELERATE_USE_CPU: Accelerate sees one process in each."""
    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=torch.cuda.is_available())
    assert accelerator.num_processes == 1, "they know of each other"
    says = "WORLD_SIZE=2 and this Accelerator has num_processes=1"
    with pytest.raises(ValueError, match=says):
        CompressedDDPPlugin().attach(accelerator)
    forget_accelerators()


def test_what_accelerate_does_not_document_is_still_there() -> None:
    asked: list[type] = []

    class Handler(DistributedDataParallelKwargs):
        def register_comm_hook(self, model: nn.Module) -> None:
            asked.append(type(model))

    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.ddp_handler is None, "where none was given"
    accelerator.ddp_handler = Handler(bucket_cap_mb=3)
    modules = [nn.Linear(WIDTH, 2) for _ in range(2)]
    prepared = accelerator.prepare(*modules)
    assert asked == [nn.parallel.DistributedDataParallel] * 2, "once for every prepared model"
    assert [model.bucket_bytes_cap for model in prepared] == [3 << 20] * 2
    for of_accelerator, module in zip(accelerator._models, modules, strict=True):
        assert of_accelerator is module, "_models are the modules before DDP wraps them"
    assert accelerator.init_handler is None
    assert accelerator.scaler is None
    assert accelerator.parallelism_config is None
    # Once Accelerate takes subclasses in kwargs_handlers, ours needs no subclass any more.
    with pytest.raises(KeyError):
        accelerate.Accelerator(cpu=True, kwargs_handlers=[Handler()])
    forget_accelerators()


class Notes(GeneralTracker):
    """A tracker that remembers."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.configuration: Facts = {}
        self.logged: list[tuple[int | None, Facts]] = []

    @property
    def tracker(self) -> Notes:
        return self

    def store_init_configuration(self, values: Facts) -> None:
        self.configuration |= values

    def log(self, values: Facts, step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))


@pytest.mark.parametrize("by_hand", [True, False])
def test_trackers_get_bytes_and_configuration_from_rank_0(by_hand: bool) -> None:
    """The configuration is that of the other frameworks."""
    forget_accelerators()
    before = INT8.attach(accelerate.Accelerator(cpu=True)).configuration()
    notes = Notes()
    with Run(INT8, by_hand=by_hand, log_with=notes) as run:
        given = {"lr": 0.1, **(run.compression.configuration() if by_hand else {})}
        run.accelerator.init_trackers("project", config=given)
        run.compression.log(0)  # nothing was sent so far
        run.train(2)
        run.compression.log(step=2)
        (stats,) = run.compression.comm_stats()
        nested = dict(run.compression.reducers[0].comm_config())
    if dist.get_rank() == 1:
        assert (notes.logged, notes.configuration) == ([], {})
        return
    ((step, logged),), last = notes.logged, stats["last_step"]
    assert step == 2
    assert logged["comm/wire_bytes"] == last["wire_bytes"] > 0
    assert logged["comm/total_wire_bytes"] == stats["wire_bytes"] == 2 * last["wire_bytes"]
    assert logged["comm/compression_ratio"] == last["ratio"] > 1
    configuration = notes.configuration
    known = {"codec": "Int8(block_size=256)", "world_size": 2, "topology": "1 host x 2 ranks"}
    known["versions/torch"] = torch.__version__
    given = {"lr": 0.1, **{f"lightning_dist/{name}": value for name, value in known.items()}}
    assert configuration | given == configuration
    assert {type(value) for value in configuration.values()} <= {str, int, float, bool}
    of_ranks = {f"lightning_dist/{n}" for n in ("exchange", "topology", "hosts", "world_size")}
    assert set(before) == {*configuration} - of_ranks - {"lr"}
    names = [*(f"versions/{name}" for name in nested.pop("versions")), *nested]
    assert set(configuration) == {f"lightning_dist/{name}" for name in names} | {"lr"}


@pytest.mark.slow
def test_wandb_through_accelerate(tmp_path: Path) -> None:
    """Accelerate's own tracker, offline."""
    wandb = pytest.importorskip("wandb")
    options = {"dir": str(tmp_path), "mode": "offline", "settings": {"silent": True}}
    with Run(INT8, by_hand=False, log_with="wandb") as run:
        run.accelerator.init_trackers("p", config={"lr": 0.1}, init_kwargs={"wandb": options})
        for step in range(2):
            run.train(1)
            run.compression.log(step)
        wanted, metrics = run.compression.reducers[0].comm_config(), run.compression.metrics()
        assert of_all(metrics) == [metrics] * 2, "rank 1 sends as much and logs nothing"
        if dist.get_rank() == 1:
            return
        run.accelerator.get_tracker("wandb").finish()
        wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found, logged = config(path), history(path)
    assert found["lr"] == 0.1
    assert found["lightning_dist/min_compress_numel"] == "None"
    for name in ("codec", "world_size"):
        assert found[f"lightning_dist/{name}"] == wanted[name]
    assert found["lightning_dist/versions/lightning_dist"] == wanted["versions"]["lightning_dist"]
    last = {name: json.loads(values[-1]) for name, values in logged.items() if "comm/" in name}
    assert last == metrics
    total = [json.loads(value) for value in logged["comm/total_wire_bytes"]]
    assert total == [metrics["comm/wire_bytes"] * steps for steps in (1, 2)]
