"""Local steps under a Trainer, Fabric and an ElasticLoop, on two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from local_steps import (
    COMPRESSED,
    KEY,
    SCHEDULE,
    SameData,
    Watched,
    fit,
    looped,
    strategy,
    trained,
)
from needs import needs
from replicas import of_all, require_equal
from scenarios.fabric_runs import Run
from scenarios.fitting import digest, half, parameters, plain
from scenarios.models import Finetuning, Regression
from scenarios.world import TIMEOUT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD
from torch.utils.data import DataLoader, Subset

from lightning_dist import AsyncCheckpoint, ElasticLoop, local_updates
from lightning_dist.base.features import FSDP
from lightning_dist.checkpoint.reading import load
from lightning_dist.elastic.loop.objects import Objects
from lightning_dist.fabric import LocalUpdateStrategy as FabricStrategy

pytestmark = pytest.mark.on_ranks(2)


def same_on_both(own: list[str]) -> list[bool]:
    return [first == second for first, second in zip(*of_all(own), strict=True)]


def on_fabric(**settings: Any) -> FabricStrategy:
    return FabricStrategy(**{"min_compress_numel": 0, "timeout": TIMEOUT, **settings})


def test_a_trainer_does_what_a_loop_does() -> None:
    _, watched = fit(strategy(codec="int8"), gradient_clip_val=0.1)
    model = SameData()
    optimizer = model.configure_optimizers()
    updates, norms = local_updates(model, optimizer, codec="int8", **COMPRESSED), list[float]()

    def clip(_: int) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

    own = trained(model, optimizer, updates, before=clip, after=lambda _: updates.step())
    assert watched.own == own
    assert same_on_both(own) == [False] * 7 + [True] * 2, "the mean"
    first, second = of_all(norms)
    assert max(*first, *second) > 0.1
    assert first != second, "each worker clips its own gradient"


@pytest.mark.parametrize("framework", ["trainer", "fabric"])
def test_post_local_sgd_is_ddp_until_it_starts(framework: str) -> None:
    """Two steps of DDP, of two batches each, and two local ones; beside DDP alone."""
    settings = {"method": "post_local_sgd", "ddp_steps": 2, "sync_every": 2, "codec": "none"}
    if framework == "trainer":
        local = strategy(overlap_steps=0, mixing=0.0, **settings)
        fits = [fit(of, accumulate_grad_batches=2) for of in (local, plain())]
        ours, ddp = (watched.own[1:8:2] for _, watched in fits)
    else:
        runs = [Run(of, accumulate=2) for of in (on_fabric(**settings), "ddp")]
        for run in runs:
            run.train(8)
        ours, ddp = (run.digests for run in runs)
    assert ours[:2] == ddp[:2]
    assert same_on_both(ours) == [True, True, False, True]


def test_a_layer_that_a_callback_unfreezes() -> None:
    model, start = SameData(), SameData().net[0].weight.detach().clone()
    fit(strategy(codec="int4"), Finetuning(), model=model)
    assert not torch.equal(model.net[0].weight, start)
    assert len({*of_all(digest(model))}) == 1


class Overflows(SameData):
    """The loss of rank 0 is infinite in the second step of the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hit = dist.get_rank() == 0 and batch_idx == 1 and self.current_epoch == 0
        return super().training_step(batch, batch_idx) * (float("inf") if hit else 1.0)


def require_one_skipped(module: nn.Module, own: list[str], attempted: int, scale: float) -> None:
    """By the worker of rank 0, in its second step of 8."""
    assert of_all(own[0] == own[1]) == [True, False]
    assert of_all(attempted) == [8, 8]
    assert of_all(scale) == [2.0**9, 2.0**10]
    require_equal(parameters(module), of_all(parameters(module))[0])
    assert all(each.isfinite().all() for each in module.parameters())


def test_a_step_that_a_scaler_skips_on_one_worker_counts_and_is_resumed(tmp_path: Path) -> None:
    """Saved after 4 steps of 8."""
    found = []
    for path in (None, tmp_path / "epoch=0.ckpt"):
        saver = ModelCheckpoint(
            tmp_path, filename="{epoch}", save_top_k=-1, enable_version_counter=False
        )
        given = {"plugins": half(), "ckpt_path": path, "enable_checkpointing": True}
        trainer, watched = fit(strategy(codec="int8"), saver, model=Overflows(), **given)
        found.append((trainer.precision_plugin.scaler.get_scale(), watched.own))
        dist.barrier()
        if path is None:
            attempted = trainer.strategy.updates.attempted
            require_one_skipped(trainer.lightning_module, watched.own, attempted, found[0][0])
    (scale, whole), (scale_again, resumed) = found
    assert resumed == whole[4:]
    assert scale_again == scale


def test_a_step_that_a_scaler_skips_on_one_worker_counts_under_fabric() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ours = on_fabric(codec="int8", **SCHEDULE)
    run = Run(ours, plugins=MixedPrecision("16-mixed", device="cpu", scaler=scaler))
    batches = list(run.batches)
    if dist.get_rank() == 0:
        batches[1] = batches[1][0], batches[1][1] * float("inf")
    run.batches = iter(batches)
    run.train(8)
    ours.updates.finish()
    require_one_skipped(run.model, run.digests, ours.updates.attempted, scaler.get_scale())


def test_a_resumed_training_is_bit_exact_from_one_file_and_from_parts(tmp_path: Path) -> None:
    """Saved after 4 steps of 8: in the middle of a window, one step after an exchange began."""
    naming = {"filename": "{epoch}", "auto_insert_metric_name": False, "save_top_k": -1}

    def saving(saver: L.Callback, **arguments: Any) -> tuple[L.Trainer, Watched]:
        return fit(strategy(codec="int4"), saver, enable_checkpointing=True, **arguments)

    def whole(name: str, **arguments: Any) -> tuple[L.Trainer, Watched]:
        return saving(ModelCheckpoint(tmp_path / name, **naming), **arguments)

    def in_parts(name: str, **arguments: Any) -> list[str]:
        saver = AsyncCheckpoint(tmp_path / name, format="sharded", **naming)
        with patch.object(dist, "gather_object", side_effect=AssertionError("gathered")):
            return saving(saver, **arguments)[1].own

    one_file, parts = tmp_path / "one" / "0.ckpt", tmp_path / "parts" / "0.ckpt"
    straight, watched = whole("one")
    assert whole("one again", ckpt_path=one_file)[1].own == watched.own[4:]
    assert in_parts("parts") == watched.own
    dist.barrier()
    assert in_parts("parts again", ckpt_path=parts) == watched.own[4:]

    single, sharded = torch.load(one_file, weights_only=True), load(str(parts))
    anchor = single[KEY]["shared"]["anchor"]
    require_equal({name: single["state_dict"][name] for name in anchor}, anchor)
    other, _ = fit(plain(), ckpt_path=one_file, max_epochs=1)
    require_equal(parameters(other.lightning_module), anchor)
    last = torch.load(tmp_path / "one" / "1.ckpt", weights_only=True)["state_dict"]
    require_equal(last, parameters(straight.lightning_module))

    workers, as_single = sharded[KEY]["workers"], single[KEY]["workers"]
    torch.testing.assert_close(workers, as_single, rtol=0, atol=0)
    own, other = (each["optimizer_states"] for each in workers)
    torch.testing.assert_close(sharded["optimizer_states"], own, rtol=0, atol=0)
    assert not torch.equal(own[0]["state"][0]["exp_avg"], other[0]["state"][0]["exp_avg"])


def test_an_elastic_loop_goes_on_bit_exactly(tmp_path: Path) -> None:
    """Stopped after 4 steps of 8, saved after 3."""
    _, whole = looped(tmp_path / "whole")
    looped(tmp_path / "stopped", stop=4)
    dist.barrier()
    assert looped(tmp_path / "stopped")[1] == whole[3:]
    same = same_on_both(whole)
    assert not same[0]
    assert same[-1]


def test_an_elastic_loop_restarts_with_files_of_all_workers(tmp_path: Path) -> None:
    model = SameData()
    optimizer = model.configure_optimizers()
    updates = local_updates(model, optimizer, **COMPRESSED)
    state = {"updates": updates, "model": model, "optimizer": optimizer}
    assert Objects(state, world_size=2).to_recover() is updates
    loader = model.train_dataloader()
    loop = ElasticLoop(tmp_path, loader=loader, state=state, format="sharded")
    with (
        patch.object(dist, "barrier", wraps=dist.barrier) as barrier,
        pytest.raises(
            ValueError, match="with local steps every worker has its own optimizer state"
        ),
    ):
        loop.__enter__()
    # Who gives up a group that another rank does not have yet closes what that one waits for.
    assert barrier.call_count == 3, "one group for facts, one for stops, one for writers"
    updates.close()


class UnequalData(Regression):
    """Batches of 6 on one rank and of 2 on the other, four of each."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")

    def train_dataloader(self) -> DataLoader[Any]:
        size = 2 + 4 * dist.get_rank()
        dataset = super().train_dataloader().dataset
        return DataLoader(Subset(dataset, range(4 * size)), batch_size=size)


def test_workers_count_by_their_samples_in_every_framework() -> None:
    settings: dict[str, Any] = {**SCHEDULE, "weigh_by": "samples", "codec": "int8"}
    _, watched = fit(strategy(**settings), model=UnequalData(), use_distributed_sampler=False)
    model = UnequalData()
    optimizer = model.configure_optimizers()
    updates = local_updates(model, optimizer, min_compress_numel=0, **settings)
    batches = [*model.train_dataloader(), *model.train_dataloader()]
    own = trained(model, optimizer, updates, batches=batches, after=updates.step)
    assert watched.own == own
    assert updates.metrics()["outer/samples"] == 2 * (2 + 6)
    first, second = of_all(own)
    assert first != second
    ours, model = on_fabric(**settings), UnequalData()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ours)
    fabric.launch()
    _, optimizer = fabric.setup(model.net, model.configure_optimizers())
    with pytest.raises(ValueError, match=r"call strategy\.count_samples"):
        optimizer.step()
    counts = ours.count_samples
    assert trained(model, optimizer, ours.updates, batches=batches, before=counts) == own


def test_validation_uses_the_anchor_or_the_workers_own_weights() -> None:
    """In the middle of windows; it changes nothing."""
    given = {"limit_val_batches": 1, "val_check_interval": 2}
    _, anchor = fit(strategy(codec="int8", evaluate="anchor"), **given)
    _, worker = fit(strategy(codec="int8", evaluate="worker"), **given)
    assert same_on_both(anchor.validated) == [True] * 4
    assert not all(same_on_both(worker.validated))
    assert anchor.own == worker.own


def test_a_validation_after_the_fit_uses_the_checkpoint_that_it_is_given(tmp_path: Path) -> None:
    """It has weights that are not of this Trainer's fit."""
    path = tmp_path / "other.ckpt"
    saver = ModelCheckpoint(tmp_path, filename="other")
    fit(plain(), saver, enable_checkpointing=True, max_epochs=1)
    trainer, watched = fit(strategy(codec="int8"), limit_val_batches=1)
    watched.validated.clear()
    trainer.validate(trainer.lightning_module, ckpt_path=path)
    trainer.save_checkpoint(tmp_path / "validated.ckpt")
    other, saved = (
        torch.load(tmp_path / name, weights_only=True)["state_dict"]
        for name in ("other.ckpt", "validated.ckpt")
    )
    model = SameData()
    model.load_state_dict(other)
    assert watched.validated == [digest(model)]
    require_equal(saved, other)


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="needs Lightning 2.6")
def test_averaged_weights_are_of_each_worker_and_their_mean_at_the_end() -> None:
    averages = callbacks.WeightAveraging()
    trainer, watched = fit(strategy(codec="none", overlap_steps=0, mixing=0.0), averages)
    end = parameters(trainer.lightning_module)
    first, second = of_all(parameters(averages._average_model.module))
    for name, value in end.items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)
    same = same_on_both(watched.own)
    assert not all(same)
    assert same[-1]


def run_on(of: Any, *, path: Any = None, skipped: int = 0) -> Run:
    run = Run(of, momentum=0.5)
    if path is not None:
        run.fabric.load(path, run.state())
    for _ in range(skipped):
        next(run.batches)
    return run


def test_fabric_resumes_bit_exact_with_the_anchor_as_weights(tmp_path: Path) -> None:
    """Saved after 4 steps, inside a window and an overlap."""
    path, settings = tmp_path / "ours.ckpt", {"codec": "int4", **SCHEDULE}
    whole = run_on(on_fabric(**settings))
    whole.train(4)
    whole.fabric.save(path, whole.state())
    anchor = whole.fabric.strategy.updates.anchor_state_dict()
    whole.train(4)
    resumed = run_on(on_fabric(**settings), path=path, skipped=4)
    resumed.train(4)
    assert resumed.digests == whole.digests[4:]
    assert not same_on_both(whole.digests)[0]
    for run in (whole, resumed):
        run.fabric.strategy.updates.finish()
    require_equal(parameters(resumed.model), parameters(whole.model))
    require_equal(parameters(whole.model), of_all(parameters(whole.model))[0])
    require_equal(torch.load(path, weights_only=True)["model"], anchor)


def test_fabric_takes_the_weights_of_plain_ddp_and_one_model_with_its_optimizer(
    tmp_path: Path,
) -> None:
    ddp = run_on("ddp")
    ddp.train(2)
    ddp.fabric.save(tmp_path / "ddp.ckpt", ddp.state())
    other = run_on("compressed_local_sgd", path=tmp_path / "ddp.ckpt")
    with other.fabric.no_backward_sync(other.model):
        anchor = other.fabric.strategy.updates.anchor_state_dict()
    require_equal(anchor, parameters(ddp.model.module))
    model = Regression().net
    with pytest.raises(ValueError, match=r"call fabric\.setup\(model, optimizer\)"):
        other.fabric.setup_module(model)
    with pytest.raises(ValueError, match="got a second one"):
        other.fabric.setup(model, SGD(model.parameters(), lr=0.1))


def test_by_name_with_statistics_and_metrics(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=str(dist.get_rank()))
    trainer, watched = fit("compressed_local_sgd", logger=logger, max_epochs=4)
    assert same_on_both(watched.own)[-1]
    assert trainer.strategy.comm_stats()["steps"] == 2  # a window of 8, and the end
    assert trainer.strategy.comm_config()["local_updates"]["sync_every"] == 8
    if dist.get_rank() == 0:
        header = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0]
        assert {"outer/cosine", "outer/drift", "comm/wire_bytes"} <= {*header.split(",")}


def test_what_cannot_work_is_refused() -> None:
    model = nn.Linear(4, 4)
    after_ddp = {"replicas": "node", "method": "post_local_sgd", "ddp_steps": 2}
    cases: list[tuple[str, Callable[[], object]]] = [
        ("ddp_steps are steps of plain DDP", lambda: strategy(start_step=3)),
        ("replicas must be 'rank' or 'node'", lambda: strategy(replicas="machine")),
        ("give one of the two", lambda: strategy(**after_ddp)),
        (
            "compile_kernels is a setting of DDP and cannot take effect under local updates",
            lambda: strategy(compile_kernels=True),
        ),
        ("set them there", lambda: strategy(outer_lr=0.5, outer_optimizer=SGD)),
        ("needs several nodes", lambda: fit(strategy(replicas="node"))),
        ("must have an outer step", lambda: fit(strategy(sync_every=100))),
        (
            "exchanges between ranks in every step",
            lambda: local_updates(model, ZeroRedundancyOptimizer(model.parameters(), SGD)),
        ),
    ]
    for says, case in cases:
        with pytest.raises(ValueError, match=says):
            case()
        dist.barrier()


@needs(FSDP)
def test_workers_are_not_sharded_over_all_ranks() -> None:
    shards = nn.Linear(4, 4)
    fully_shard(shards, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="sharded over all 2 ranks; call fully_shard over the"):
        local_updates(shards, SGD(shards.parameters()))


def test_each_worker_of_a_loop_keeps_its_loss_scale() -> None:
    """Another one on each, where gradients of one have overflown."""
    model, own = nn.Linear(4, 2), 16.0 * 2 ** dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters())
    updates = local_updates(model, optimizer, method="local_sgd", sync_every=2, codec="none")
    scaler = torch.amp.GradScaler("cpu", init_scale=own)
    given = {"model": model, "optimizer": optimizer, "updates": updates, "scaler": scaler}
    objects = Objects(given, world_size=2)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    updates.step()
    saved = of_all(objects.states())[0]
    scaler.update(1.0)
    objects.load_states(saved)
    assert scaler.get_scale() == own
    updates.close()
