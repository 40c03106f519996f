"""Checkpoints of sharded models that take local steps: resumed, elsewhere and by others."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import weights
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from local_model_parallel import (
    SCHEDULE,
    Normed,
    Unequal,
    all_same,
    anchor_of,
    ours,
    state_of,
    watch,
)
from local_steps import Interrupted
from model_parallel_runs import (
    BATCHES,
    FAULTS,
    Module,
    Reshaped,
    elastic_start,
    fitted,
    same,
    watch_reads,
)
from replicas import require_equal, world_of
from torch import Tensor

from lightning_dist import AsyncCheckpoint, CompressedModelParallelStrategy, LocalUpdateStrategy

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(4, hosts=2)]


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))


class Overflows(Normed):
    """The loss of the first worker is infinite in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hit = dist.get_rank() == 1 and batch_idx == 1 and self.current_epoch == 0
        return super().training_step(batch, batch_idx) * (float("inf") if hit else 1.0)


HOW = ("distributed", "one file", "async")
"""By Lightning in two formats, or by AsyncCheckpoint."""


def saved(
    folder: Path,
    module: Module | None = None,
    *,
    how: str = "one file",
    fitting: Any = None,
    **settings: Any,
) -> Path:
    """A checkpoint in the middle of a window, of two workers of two ranks."""
    path, callbacks = folder / how, [Interrupted(BATCHES, folder / how)]
    given = dict(fitting or {})
    if how == "async":
        saves = {"filename": "async", "every_n_train_steps": BATCHES}
        callbacks = [AsyncCheckpoint(folder, format="sharded", **saves), Interrupted(BATCHES)]
        path, given["enable_checkpointing"] = folder / "async.ckpt", True
    strategy = ours(save_distributed_checkpoint=how != "one file", **settings)
    with suppress(InterruptedError):
        watch(strategy, module, *callbacks, **given)
    dist.barrier()
    return path


def moments_of(worker: dict[str, Any]) -> list[Tensor]:
    return [each["exp_avg"] for each in worker["optimizer_states"][0]["state"].values()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "settings", "formats"),
    [
        (Normed, {"codec": "int4"}, HOW),
        (Normed, {"codec": "powersgd:rank=2"}, ("distributed", "async")),
        (Normed, {"outer_optimizer": partial(torch.optim.AdamW, lr=0.01)}, ("async",)),
        (Overflows, {"codec": "int8"}, ("distributed", "async")),
        (Unequal, {"codec": "int8", "weigh_by": "samples"}, ("distributed",)),
    ],
    ids=["int4", "powersgd", "Adam outside", "scaler", "samples"],
)
def test_a_resumed_training_is_that_without_a_pause(
    make: Callable[[], Module], settings: dict[str, Any], formats: Sequence[str], tmp_path: Path
) -> None:
    """Interrupted while an exchange is under way: the bits of a run that was not."""

    def given() -> dict[str, Any]:
        plugins = [scaled()] if make is Overflows else []
        return {"plugins": plugins, "use_distributed_sampler": make is not Unequal}

    straight_run, _, straight = watch(ours(**settings), make(), **given())
    for how in formats:
        path = saved(tmp_path, make(), how=how, fitting=given(), **settings)
        strategy = ours(save_distributed_checkpoint=how != "one file", **settings)
        with pytest.MonkeyPatch.context() as patching:
            read = watch_reads(patching)
            again, _, got = watch(strategy, make(), ckpt_path=path, **given())
        assert all_same(got.own, straight.own[BATCHES:]), how
        if (how, settings.get("codec")) == ("async", "int4"):
            # Weights, two moments of Adam, and of its own worker these three again; anchor,
            # residual and the mean that is under way (momentum is not there yet): of a shard of
            # 1350 elements.
            assert 0 <= sum(read) - 4 * (3 + 3 + 3) * 1350 < 2000
        if make is Overflows:
            scales = [r.precision_plugin.scaler.get_scale() for r in (straight_run, again)]
            assert scales == [2.0**9 if dist.get_rank() < 2 else 2.0**10] * 2


@pytest.mark.exhaustive
def test_samples_that_a_worker_has_counted_are_of_its_first_rank(tmp_path: Path) -> None:
    """Of two workers of two ranks, where four of one go on."""
    settings, seen = {"codec": "int8", "weigh_by": "samples"}, list[float]()
    given = {"use_distributed_sampler": False}
    path = saved(tmp_path, Unequal(), how="distributed", fitting=given, **settings)
    strategy = ours(**settings, replicate_size=4)
    note = LambdaCallback(
        on_train_start=lambda *_: seen.append(strategy.updates._gradients.samples)
    )
    watch(strategy, Unequal(), note, ckpt_path=path, **given)
    assert seen == [[BATCHES * (1 + 2), BATCHES * (3 + 4), 0, 0][dist.get_rank()]]


def require_goes_on(path: Path, *, workers: int) -> None:
    """Workers of one rank from two of two."""
    state, rank = state_of(path), dist.get_rank()
    own, other = (state["workers"][each % 2] for each in (rank, rank + 1))
    _, module, watched = watch(ours(codec="int4", replicate_size=workers), ckpt_path=path)
    begin = own["parameters"] if rank < 2 else state["shared"]["anchor"]
    require_equal(watched.start, begin)
    weight, of_other = "blocks.0.0.weight", other["parameters"]
    assert not torch.equal(watched.start[weight], of_other[weight])
    assert same(watched.moments, moments_of(own))
    first = weights(module)
    for each in first:
        dist.broadcast(each, 0)
    assert same(first, weights(module)), "the mean at the end"


@pytest.mark.parametrize("how", HOW)
def test_four_workers_of_one_rank_or_two_go_on_from_two_of_two(how: str, tmp_path: Path) -> None:
    path = saved(tmp_path, how=how, codec="int4")
    require_goes_on(path, workers=4)
    with world_of(2) as is_here:
        if is_here:
            require_goes_on(path, workers=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", HOW[:2])
def test_other_strategies_take_the_anchor_as_weights(how: str, tmp_path: Path) -> None:
    """And the moments of the first worker."""
    path = saved(tmp_path, how=how, codec="int4")
    for strategy in (
        ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
        CompressedModelParallelStrategy("int8"),
    ):
        _, _, watched = watch(strategy, ckpt_path=path)
        require_equal(watched.start, anchor_of(path))
        assert same(watched.moments, moments_of(state_of(path)["workers"][0]))


@pytest.mark.exhaustive
def test_the_weights_of_another_strategy_are_the_anchor(tmp_path: Path) -> None:
    path, begin = tmp_path / "theirs", dict[str, Any]()
    with suppress(InterruptedError):
        watch(CompressedModelParallelStrategy("int8"), None, Interrupted(BATCHES, path))
    strategy = ours()
    note = LambdaCallback(
        on_train_start=lambda *_: begin.update(strategy.updates.anchor_state_dict())
    )
    _, _, watched = watch(strategy, None, note, ckpt_path=path)
    assert len(watched.start) == 8
    require_equal({name: begin[name].full_tensor() for name in watched.start}, watched.start)


def test_sharded_workers_go_on_as_ranks_with_the_whole_model_and_back(tmp_path: Path) -> None:
    path, rank = saved(tmp_path, codec="int4"), dist.get_rank()
    seen: dict[str, Tensor] = {}
    note = LambdaCallback(
        on_train_start=lambda _, module: seen.update(
            {name: p.detach().clone() for name, p in module.named_parameters()}
        )
    )
    of_whole = {**SCHEDULE, "codec": "int4"}
    module = Normed(is_whole=True)
    fitted(LocalUpdateStrategy(**of_whole), module, callbacks=[note], ckpt_path=path)
    own = state_of(path)["workers"][rank]["parameters"] if rank < 2 else anchor_of(path)
    require_equal(seen, own)
    path = tmp_path / "of ranks"
    with suppress(InterruptedError):
        module = Normed(is_whole=True)
        fitted(LocalUpdateStrategy(**of_whole), module, callbacks=[Interrupted(BATCHES, path)])
    dist.barrier()
    _, _, watched = watch(ours(codec="int4"), ckpt_path=path)
    worker = state_of(path)["workers"][rank // 2]
    require_equal(watched.start, worker["parameters"])
    assert same(watched.moments, moments_of(worker))


def test_runs_that_fail_at_one_hook_after_the_other_have_the_bits_of_one_that_does_not(
    tmp_path: Path,
) -> None:
    def start(run: str, *, fault: str = "") -> tuple[list[Tensor], int]:
        """Weights and outer momenta at its end, and the steps that it took."""
        strategy, taken = ours(codec="int8", sync_every=4), list[int]()
        count = LambdaCallback(on_train_batch_end=lambda *_: taken.append(1))
        module = elastic_start(tmp_path / run, strategy, count, fault=fault)
        momenta = strategy.updates.outer_optimizer.state_dict()["state"].values()
        return [*weights(module), *(each["momentum_buffer"] for each in momenta)], len(taken)

    straight, steps = start("straight")
    for hook in FAULTS:
        start("restarted", fault=hook)
    found, rest = start("restarted")
    assert same(straight, found)
    assert len(found) == 8
    assert rest < steps == 9


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    single = AsyncCheckpoint(tmp_path / "single")
    with pytest.raises(ValueError, match="set format='sharded'"):
        fitted(ours(), callbacks=[single], enable_checkpointing=True)
    module, stop = Module(optimizer=Reshaped), Interrupted(2, tmp_path / "shapes")
    with pytest.raises(ValueError, match="must have the shapes of its sharded parameters"):
        fitted(ours(), module, callbacks=[stop])
