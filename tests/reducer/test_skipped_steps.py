"""Contract 2 where a step is skipped for all parameters with state: no gradient is lost.

Under the deferred commit. With a learning rate of 1: first weights - last weights + mean residual
== sum of the mean gradients of the steps that were applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from feeding import SHAPES, Fed, Tensors, backward, compressed, digest, feed, mean
from torch import nn
from worlds import Rank, run_threads

from lightning_dist.codecs import Codec, warmup
from lightning_dist.reducer.reducer import Reducer

DOUBLE = torch.float64
DEFERRED: dict[str, Any] = {"min_compress_numel": 256, "commit": "deferred"}
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
def test_a_step_that_is_not_finite_is_undone(
    pairs: list[tuple[str, str | Codec]], tree: Any
) -> None:
    def body(rank: Rank) -> list[tuple[Tensors, Tensors, Tensors, str]]:
        return [run(rank, LOOPS[loop], codec, tree) for loop, codec in pairs]

    for pair, *ranks in zip(pairs, *run_threads(body, 3), strict=True):
        assert len({weights for *_, weights in ranks}) == 1, pair
        applied = mean([gradients for _, gradients, _, _ in ranks])
        moved, _, owed, _ = ranks[0]
        short = {n: float((moved[n] + owed[n] - applied[n]).abs().max()) for n in SHAPES}
        # Values are sent in a short type, scales too; what that loses is in the residual.
        assert max(short.values()) < 1e-11, (pair, short)


def test_a_bad_value_is_seen_in_every_parameter_with_state() -> None:
    """Or what is finite would be applied, and its state would not say so."""

    def body(rank: Rank) -> dict[str, bool]:
        with compressed(rank, Fed(), **DEFERRED) as (model, _):
            gradients = feed(rank.rank, 0)
            if rank.rank == 1:
                gradients["first"][0, 0] = torch.inf
            got = backward(model, gradients)
            assert got["bias"].isfinite().all()
            return {name: bool(got[name].isnan().all()) for name in ("first", "second")}

    assert run_threads(body, 3) == [{"first": True, "second": True}] * 3
