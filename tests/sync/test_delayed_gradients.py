"""`delay=1`: the mean of a step is applied in the next one."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from local_steps import SameData, dealt, fit
from local_worlds import WIDTH, World, on_threads, plain, require_same
from replicas import of_all, require_equal
from scenarios.fabric_runs import Run
from scenarios.fitting import compressed, digest, half, residuals
from scenarios.models import Regression
from scenarios.world import TIMEOUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist import AsyncCheckpoint, LocalUpdateStrategy, OneBitAdam, compress_ddp
from lightning_dist.codecs import CODECS
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.reducer.plan.planner import Handle
from lightning_dist.reducer.plan.slices import ParameterSlice, slices_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.step_end import DelayedMeans
from lightning_dist.sync.base import Environment, sync_of
from lightning_dist.sync.ddp import GradientSync


class Given(nn.Module):
    """Its gradient is what it is given, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((64, 80), (80,), (48, 64), (64, 2, 3, 8))
        self.weights = nn.ParameterList(
            nn.Parameter(torch.linspace(-1, 1, shape.numel()).reshape(shape))
            for shape in map(torch.Size, shapes)
        )

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(each.shape, generator=generator) for each in self.weights]
        return sum((w * x).sum() for w, x in zip(self.weights, given, strict=True))


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def delayed(
    rank: Rank, module: nn.Module, codec: str = "int8", *, tree: Any = None, **settings: Any
) -> tuple[DistributedDataParallel, Reducer]:
    ddp = settings.pop("ddp", {"bucket_cap_mb": 0.01})
    model = rank.ddp(module, **ddp)
    settings = {"min_compress_numel": 0, "delay": 1, "compile_kernels": False, **settings}
    if tree is not None:
        settings["rank_groups"] = tree
    return model, compress_ddp(model, codec, groups=rank.groups(tree), **settings)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_uncompressed_it_is_the_rule(size: int, accumulate: int) -> None:
    """Zeros first, then the mean of the step before: against one model in float64."""
    steps = 6

    def train(rank: Rank) -> list[Tensor]:
        model, reducer = delayed(rank, plain(), "none")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for step in range(steps):
            for number in range(accumulate):
                model.require_backward_grad_sync = number == accumulate - 1
                loss = model(batch(rank.rank, accumulate * step + number)).square().mean()
                (loss / accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        reducer.wait()
        assert reducer.comm_stats()["steps"] == steps
        reducer.close()
        return weights(model)

    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    last = [torch.zeros_like(each) for each in model.parameters()]
    for step in range(steps):
        for rank in range(size):
            for number in range(accumulate):
                loss = model(batch(rank, accumulate * step + number)).square().mean()
                (loss / (accumulate * size)).backward()
        mean = [each.grad.clone() for each in model.parameters()]
        for parameter, before in zip(model.parameters(), last, strict=True):
            parameter.grad.copy_(before)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        last = mean
    expected = [weights(model)] * size
    torch.testing.assert_close(run_threads(train, size), expected, rtol=1e-12, atol=1e-12)


def late(steps: int, **settings: Any) -> Callable[[Rank], list[Tensor]]:
    """Weights after so many steps of SGD on given gradients."""

    def train(rank: Rank) -> list[Tensor]:
        model, reducer = delayed(rank, Given(), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            model(10 * step + rank.rank).backward()
            optimizer.step()
        reducer.wait()
        reducer.close()
        return weights(model)

    return train


FORMS: dict[str, dict[str, Any]] = {
    "hierarchical": {"tree": [[0, 1], [2, 3]], "hierarchical": True},
    "views": {"ddp": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}},
    "static": {"ddp": {"static_graph": True, "bucket_cap_mb": 0.01}},
    "one bucket": {"ddp": {}},
}


@pytest.mark.parametrize(
    ("size", "settings"),
    [*((2, {"codec": codec}) for codec in CODECS), *((4, form) for form in FORMS.values())],
    ids=[*CODECS, *FORMS],
)
def test_it_is_the_same_training_one_step_late(size: int, settings: dict[str, Any]) -> None:
    """Error feedback too: what is owed goes with the step that it belongs to."""
    now = run_threads(late(4, delay=0, **settings), size)
    require_same(run_threads(late(5, **settings), size), now)
    assert not torch.equal(now[0][0], next(Given().parameters()))


def test_the_first_steps_may_be_in_time() -> None:
    """Up to ``start_step`` plain DDP; the step after it gets zeros."""
    plain = run_threads(late(2, delay=0, start_step=2), 2)
    for steps in (2, 3):
        require_same(run_threads(late(steps, start_step=2), 2), plain)
    ours, theirs = run_threads(late(5, start_step=2), 2)[0], run_threads(late(4, delay=0), 2)[0]
    assert not torch.equal(ours[0], plain[0][0])
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0.02)


@pytest.mark.parametrize("at", [1, 3])
@on_threads(2)
def test_a_resumed_training_is_bit_exact(world: World, at: int) -> None:
    """The mean that is on its way is in the state, and goes on in other buckets."""

    def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(batch(world.rank.rank, number)).square().mean().backward()
            optimizer.step()

    whole, reducer = delayed(world.rank, plain(), "int4")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.02)
    steps(whole, optimizer, range(at))
    own = copy.deepcopy((whole.module.state_dict(), optimizer.state_dict()))
    saved, other = world.of_all(reducer.state_dict())
    assert saved["delayed"].keys() == dict(plain().named_parameters()).keys()
    assert other is None
    steps(whole, optimizer, range(at, 6))
    reducer.close()
    module = plain()
    module.load_state_dict(own[0])
    resumed, reducer = delayed(world.rank, module, "int4", ddp={"bucket_cap_mb": 0.002})
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.02)
    optimizer.load_state_dict(own[1])
    reducer.load_state_dict(saved)
    steps(resumed, optimizer, range(at, 6))
    reducer.close()
    require_same(weights(resumed), weights(whole))


@on_threads(2)
def test_memory_is_a_copy_of_the_gradients(world: World) -> None:
    model, reducer = delayed(world.rank, Given())
    for step in range(4):
        model(step).backward()
    reducer.wait()
    gradients = sum(each.nbytes for each in model.parameters())
    assert reducer.memory()["delayed_bytes"] == gradients
    reducer.close()


def test_memory_of_buckets_that_are_no_more_is_freed() -> None:
    """DDP rebuilds its buckets after the first backward pass, and may have fewer then."""
    means, numbers = DelayedMeans(first_step=0), [3, 4, 5]
    slices = slices_of(["a", "b", "c"], [torch.zeros(n) for n in numbers])

    def swap(key: int, parts: Sequence[ParameterSlice], value: float, step: int) -> Tensor:
        flat = torch.full((sum(part.numel for part in parts),), value)
        means.swap(Handle(key, flat, parts), step=step)
        return flat

    for key, part in enumerate(slices):
        swap(key, [replace(part, offset=0)], float(key + 1), 0)
    last = swap(0, slices, 9.0, 1)
    assert last.tolist() == [1.0] * 3 + [2.0] * 4 + [3.0] * 5
    assert means.nbytes == last.nbytes


@on_threads(2)
def test_other_groups_begin_anew(world: World) -> None:
    """A mean that was on its way to ranks that are gone may not be there on all who are left."""
    model, reducer = delayed(world.rank, Given(), "none")

    def gradient(step: int) -> Tensor:
        model.zero_grad()
        model(step).backward()
        return model.module.weights[0].grad

    gradient(0)
    assert gradient(1).any()
    reducer.wait()
    reducer.rebind(world.rank.network())
    assert not gradient(2).any()
    assert gradient(3).any()
    reducer.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"delay": 2}, "delay must be 0, or 1"),
        ({"delay": True}, "delay must be 0, or 1"),
        ({"state_update": "deferred"}, "state_update='deferred' depends on whether"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "got a GradScaler"),
        ({"ddp": {"find_unused_parameters": True}}, "got find_unused_parameters=True"),
    ],
)
@on_threads(1)
def test_what_cannot_work_is_refused(world: World, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        delayed(world.rank, plain(), **settings)


@on_threads(2)
def test_momenta_are_not_delayed(world: World) -> None:
    model, reducer = delayed(world.rank, Given())
    optimizer = OneBitAdam(model.parameters(), freeze_step=2)
    with pytest.raises(ValueError, match="OneBitAdam needs exchanged momenta in the same step"):
        sync_of(model, GradientSync).connect([optimizer], Environment())
    reducer.close()


@pytest.mark.on_ranks(2)
def test_a_trainer_does_what_a_loop_does() -> None:
    trainer, watched = fit(compressed(delay=1))
    model = SameData()
    optimizer, own = model.configure_optimizers(), list[str]()
    ddp = DistributedDataParallel(model.net)
    reducer = compress_ddp(ddp, "int8", min_compress_numel=0, delay=1)
    for x, y in dealt(model):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        own.append(digest(model))
    reducer.wait()
    reducer.close()
    assert of_all(watched.own) == [[*own, own[-1]]] * 2
    assert trainer.strategy.comm_stats()["steps"] == 8


@cache
def in_one_go() -> tuple[list[str], dict[str, Tensor]]:
    """Digests and residuals of a fit of 8 steps in two epochs."""
    trainer, watched = fit(compressed("int4", delay=1))
    return watched.own, residuals(trainer.strategy)


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("saver", ["whole", "sharded"])
def test_a_resumed_fit_is_bit_exact(saver: str, tmp_path: Path) -> None:
    """After 4 steps, from a checkpoint of rank 0 and from one in parts."""
    saves: Any = ModelCheckpoint(tmp_path)
    if saver == "sharded":
        saves = AsyncCheckpoint(tmp_path, format="sharded", save_last=True)
    given = {"enable_checkpointing": True}
    fit(compressed("int4", delay=1), saves, max_epochs=1, **given)
    given["ckpt_path"] = saves.last_model_path or saves.best_model_path
    reads = AsyncCheckpoint(tmp_path / "read", format="sharded")
    trainer, resumed = fit(compressed("int4", delay=1), reads, **given)
    own, owed = in_one_go()
    assert resumed.own == own[4:]
    require_equal(residuals(trainer.strategy), owed)


@pytest.mark.on_ranks(2)
def test_a_second_fit_goes_on() -> None:
    trainer, watched = fit(compressed("int4", delay=1), max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    state = copy.deepcopy(trainer.optimizers[0].state_dict())
    trainer.callbacks.append(
        LambdaCallback(  # a fit makes new optimizers
            on_train_start=lambda *_: trainer.optimizers[0].load_state_dict(state)
        )
    )
    trainer.fit(trainer.lightning_module)
    del watched.own[4]  # the end of the first
    assert watched.own == in_one_go()[0][:8]


@pytest.mark.on_ranks(2)
def test_fabric_resumes_bit_exact(tmp_path: Path) -> None:
    def made() -> Run:
        return Run(FabricStrategy("int8", min_compress_numel=0, delay=1, timeout=TIMEOUT))

    whole, half, resumed = made(), made(), made()
    whole.train(6)
    half.train(3)
    half.fabric.save(tmp_path / "half.ckpt", half.state())
    resumed.fabric.load(tmp_path / "half.ckpt", resumed.state())
    for _ in range(3):
        next(resumed.batches)
    resumed.train(3)
    assert resumed.digests == whole.digests[3:]


class TwoOptimizers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net[0], self.net[2])]


@pytest.mark.on_ranks(2)
def test_a_trainer_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="got 2 optimizers"):
        fit(compressed(delay=1), model=TwoOptimizers())
    with pytest.raises(ValueError, match="got a GradScaler"):
        fit(compressed(delay=1), plugins=half())
    with pytest.raises(ValueError, match="overlap_steps"):
        LocalUpdateStrategy(delay=1)
