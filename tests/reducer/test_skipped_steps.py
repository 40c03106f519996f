"""Passes that are cut short and steps that are skipped lose no gradient and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from fed_model import Model
from feeding import SHAPES, Fed, Tensors, backward, compressed, digest, feed, mean, residuals
from layouts import FORMS, Layout, flat
from threads import of_all, on_threads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank

from lightning_dist.codecs import Codec, warmup
from lightning_dist.exchange.rounds import AllReduce, Exchange, TwoShot
from lightning_dist.integrations.torch.ddp import attach
from lightning_dist.reducer.reducer import Reducer

THREE = {"first": (40, 48), "second": (33, 50), "third": (16, 70)}
INTERRUPTED = 2


def model_of(rank: Rank, codec: str, layout: Layout | None = None) -> Model:
    network = rank.network(layout.tree, leader=layout.leader) if layout else rank.network()
    return Model(network, codec, shapes=THREE, error_feedback=True)


def trained(model: Model, rank: Rank, *, buckets: int, bad: bool = False) -> list[str]:
    """Digests of four steps, the third of which begins anew after ``buckets`` buckets.

    ``bad``: what rank 1 had handed over by then was not finite.
    """
    digests = []
    with closing(model.reducer):
        for step in range(4):
            if buckets and step == INTERRUPTED:
                aborted = feed(rank.rank, 77, THREE)
                if bad and rank.rank == 1:
                    aborted["first"][0, 0] = torch.inf
                model.begin(aborted, buckets)
                if bad:  # encoded, in the bucket's memory, before the next step is written there
                    model.reducer._executor.drain()
            torch.futures.wait_all(model.begin(feed(rank.rank, step, THREE)))
            digests.append(digest([*model.flats.values(), *residuals(model.reducer).values()]))
        assert model.reducer.comm_stats()["steps"] == 4
    return digests


@pytest.mark.parametrize("codec", ["int8", "fp16", "powersgd:rank=2", "threshold:tau=1.5"])
@pytest.mark.parametrize("layout", [flat(2), flat(3), *FORMS], ids=str)
@on_threads("layout")
def test_the_next_step_is_clean(rank: Rank, codec: str, layout: Layout) -> None:
    """Gradients and residuals equal those of a run in which that step never began.

    The next step is finite on every rank, whatever was handed over before, and is not undone.
    """
    ways = [(0, False), (1, True), (2, True)]
    if layout.tree or codec in ("int8", "fp16"):  # others add what is owed in the bucket's memory
        ways += [(1, False), (2, False)]
    clean, *interrupted = (
        trained(model_of(rank, codec, layout), rank, buckets=of, bad=bad) for of, bad in ways
    )
    assert all(digests == clean for digests in interrupted)


@pytest.mark.parametrize(("exchange", "codec"), [(AllReduce, "fp16"), (TwoShot, "int8")])
@on_threads(3)
def test_a_failure_of_what_was_left_over_reaches_the_new_step(
    rank: Rank, exchange: type[Exchange], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the payloads of the interrupted step fails: the new step must say so."""

    def fail(self: object) -> None:
        raise RuntimeError("the link broke")

    model = model_of(rank, codec)
    with closing(model.reducer):
        model.begin(feed(rank.rank, 0, THREE), 1)
        rank.barrier.wait()
        monkeypatch.setattr(exchange, "wait", fail)
        model.flats = {name: flat.clone() for name, flat in model.flats.items()}
        (future,) = model.begin(feed(rank.rank, 1, THREE), 1)
        model.reducer._executor.drain()
        assert future.done(), "nobody told the new step"
        with pytest.raises(RuntimeError, match="the link broke"):
            future.value()


class _Failing(torch.autograd.Function):
    """Identity whose backward raises when it is asked to."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise MemoryError("out of memory in the middle of the backward pass")
        return grad, None


class Halfway(nn.Module):
    """``Fed`` whose backward fails, on demand, after the first bucket has been handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.fed, self.fails = Fed(), False

    def forward(self, given: Tensors) -> Tensor:
        last = _Failing.apply(self.fed({"first": given["first"]}), self.fails)
        return last + self.fed({name: given[name] for name in ("second", "bias")})


SETTINGS = {"min_compress_numel": 256, "commit": "deferred", "ddp": {"bucket_cap_mb": 0.004}}


def train(model: nn.Module, rank: Rank, steps: range) -> list[str]:
    return [digest(dict(sorted(backward(model, feed(rank.rank, s)).items()))) for s in steps]


@on_threads(2)
def test_a_real_backward_that_raises_then_a_new_ddp(rank: Rank) -> None:
    """DDP itself takes no further step after that; a new DDP goes on with the old residuals."""
    with compressed(rank, Halfway(), **SETTINGS) as (model, _):
        uninterrupted = train(model, rank, range(5))
    module = Halfway()
    with compressed(rank, module, **SETTINGS) as (model, old):
        digests = train(model, rank, range(3))
        module.fails = True
        with pytest.raises(MemoryError):
            backward(model, feed(rank.rank, 77))
        module.fails = False
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(feed(rank.rank, 3))
    # A copy of the module: on the old one the old DDP's hooks fire for as long as it is alive.
    copy = Halfway()
    copy.load_state_dict(module.state_dict())
    new = DistributedDataParallel(copy, process_group=rank.group("new"), bucket_cap_mb=0.004)
    groups = [rank.group("new payload"), rank.group("new flags")]
    with closing(attach(new, old.settings, continue_from=old, groups=groups)):
        assert digests + train(new, rank, range(3, 5)) == uninterrupted


DOUBLE = torch.float64
STEPS = 8
BAD = {2: ("second", torch.inf), 3: ("second", torch.nan), 5: ("first", -torch.inf)}
"""What is not finite on rank 1, by step."""
CODECS: tuple[str | Codec, ...] = (
    "int8",
    "topk:ratio=0.1,block_size=128",
    "threshold:tau=1.5",
    "powersgd:rank=2",
    warmup({0: "int8", 5: "none"}),  # the residuals are sent in a step that is bad
)
TREES = [None, [[0, 1], [2]]]


@dataclass
class Loop:
    """A training loop.

    ``groups``: names of the parameters of each optimizer; ``scaled``: under a GradScaler;
    ``before_step``: what happens to the gradients, True where the step is then left out;
    ``skipped``: names of the parameters to which a step is not applied that is bad in one.
    """

    groups: Sequence[Sequence[str]]
    scaled: bool
    skipped: Sequence[str]
    before_step: Callable[[nn.Module], bool] = lambda module: False
    fused: bool = False


def replaces(module: nn.Module) -> bool:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return False


def leaves_out(module: nn.Module) -> bool:
    return not all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


ALL, TWO = [["first", "bias", "second"]], [["first", "bias"], ["second"]]
LOOPS = {
    "one optimizer, GradScaler": Loop(ALL, True, ALL[0]),
    "one fused optimizer, GradScaler": Loop(ALL, True, ALL[0], fused=True),
    "two optimizers, GradScaler": Loop(TWO, True, ALL[0]),
    "nan_to_num": Loop(ALL, False, ("first", "second"), replaces),
    "two optimizers, nan_to_num": Loop(TWO, False, ("first", "second"), replaces),
    "a loop that leaves the step out": Loop(ALL, False, ALL[0], leaves_out),
}


def given(rank: int, step: int) -> Tensors:
    gradients = feed(rank, step, dtype=DOUBLE)
    if rank == 1 and step in BAD:
        name, value = BAD[step]
        gradients[name].view(-1)[-3] = value
    return gradients


def mean_residuals(reducer: Reducer) -> Tensors:
    """On rank 0. Parameters that are not compressed owe nothing."""
    state = reducer.state_dict()
    rows = {} if state is None else state["residuals"]
    return {n: rows[n].mean(0).view(s) if n in rows else torch.zeros(s) for n, s in SHAPES.items()}


def run(
    rank: Rank, loop: Loop, codec: str | Codec, tree: Any
) -> tuple[Tensors, Tensors, Tensors, str]:
    """What weights have moved, what was applied, what is owed, and a digest of the weights."""
    module = Fed(dtype=DOUBLE)
    first = {name: p.detach().clone() for name, p in module.named_parameters()}
    applied = {name: torch.zeros_like(p) for name, p in first.items()}
    own = dict(module.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=loop.scaled)
    optimizers = [
        torch.optim.SGD([own[name] for name in names], lr=1.0, fused=loop.fused)
        for names in loop.groups
    ]
    settings = {"min_compress_numel": 256, "error_feedback": True, "tree": tree}
    settings["grad_scaler"] = scaler if loop.scaled else None
    with compressed(rank, module, codec, commit="deferred", **settings) as (model, reducer):
        for step in range(STEPS):
            model.zero_grad()
            scaler.scale(model(given(rank.rank, step))).backward()
            if not loop.before_step(module):
                for optimizer in optimizers:
                    scaler.step(optimizer)
            scaler.update()
            for name in applied.keys() - set(loop.skipped if step in BAD else ()):
                applied[name] += given(rank.rank, step)[name]
        owed = mean_residuals(reducer)
    moved = {name: first[name] - p.detach() for name, p in module.named_parameters()}
    return moved, applied, owed, digest(module.parameters())


PAIRS = [
    *((loop, codec) for loop in LOOPS for codec in ("int8", CODECS[-1])),
    *((loop, codec) for loop in list(LOOPS)[::3] for codec in CODECS[1:-1]),
]
"""Every loop and every codec; all pairs of them are slow."""


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(PAIRS, id="some"),
        pytest.param(list(product(LOOPS, CODECS)), id="all", marks=pytest.mark.slow),
    ],
)
@on_threads(3)
def test_a_step_that_is_not_finite_is_undone(
    rank: Rank, pairs: list[tuple[str, str | Codec]], tree: Any
) -> None:
    for pair in pairs:
        loop, codec = pair
        ranks = of_all(rank, run(rank, LOOPS[loop], codec, tree))
        assert len({weights for *_, weights in ranks}) == 1, pair
        applied = mean([gradients for _, gradients, _, _ in ranks])
        moved, _, owed, _ = ranks[0]
        short = {n: float((moved[n] + owed[n] - applied[n]).abs().max()) for n in SHAPES}
        # Values are sent in a short type, scales too; what that loses is in the residual.
        assert max(short.values()) < 1e-11, (pair, short)
