"""Residuals of a schedule that moves to a codec without one are sent in one step and freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from feeding import (
    SHAPES,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    gradients,
    mean,
    residuals,
)
from layouts import FORMS, Layout, flat
from saving import through_a_file
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import Codec, by_name, by_size, warmup
from lightning_dist.reducer.reducer import Reducer

DOUBLE = torch.float64
SWITCH, STEPS = 3, 6
TOPK, DGC = "topk:ratio=0.1,block_size=128", "dgc:ratio=0.1,block_size=128"
State = Mapping[str, Any]

SCHEDULES: dict[str, tuple[Codec, set[str]]] = {  # and what still has a residual at the end
    "int8, none": (warmup({0: "int8", SWITCH: "none"}), set()),
    "topk, none": (warmup({0: TOPK, SWITCH: "none"}), set()),
    "powersgd, none": (warmup({0: "powersgd:rank=2", SWITCH: "none"}), set()),
    "threshold, none": (warmup({0: "threshold:tau=1.5", SWITCH: "none"}), set()),
    "by_name": (
        warmup({0: "int8", SWITCH: by_name("int8", {"second": "none"})}),
        {"first"},
    ),
    "by_size": (
        warmup({0: by_size("int8", min_numel=1), SWITCH: by_size("int8", min_numel=1800)}),
        {"first"},
    ),
    "schedule in a rule": (
        by_name("int8", {"first": warmup({0: TOPK, SWITCH: "none"})}),
        {"second"},
    ),
}


@dataclass
class Run:
    """What one rank put in and got out, and what is saved at the end (on rank 0)."""

    went_in: Tensors
    came_out: Tensors
    digests: list[str]
    names: list[str]  # of the residuals that this rank knows of
    memory: int  # bytes of state
    state: State | None


def run(
    rank: Rank,
    codec: str | Codec,
    *,
    layout: Layout | None = None,
    steps: range = range(STEPS),
    given: Callable[[Rank, int], Tensors] = lambda rank, step: feed(rank.rank, step, dtype=DOUBLE),
    load: State | None = None,
    commit: str = "auto",
) -> Run:
    """Steps that are not finite count as skipped."""
    zero = {name: torch.zeros(shape, dtype=DOUBLE) for name, shape in SHAPES.items()}
    went_in, came_out, digests = zero, zero, []
    form = {"min_compress_numel": 256, "commit": commit, **(layout.form if layout else {})}
    with compressed(rank, Fed(dtype=DOUBLE), codec, **form) as (model, reducer):
        if load is not None:
            reducer.load_state_dict(load)
        for step in steps:
            fed = given(rank, step)
            got = backward(model, fed)
            digests.append(digest(got))
            if all(value.isfinite().all() for value in got.values()):
                went_in = {name: went_in[name] + fed[name] for name in SHAPES}
                came_out = {name: came_out[name] + got[name] for name in SHAPES}
        names, memory = list(reducer.residuals), reducer.memory()["residual_bytes"]
        return Run(went_in, came_out, digests, names, memory, saved(reducer))


def saved(reducer: Reducer) -> State | None:
    state = reducer.state_dict()
    return None if state is None else through_a_file(state)


def lost(ranks: list[Run]) -> float:
    """Largest element of: sum of outputs + mean residual - sum of mean inputs."""
    state = ranks[0].state
    assert state is not None
    went_in, worst = mean([each.went_in for each in ranks]), 0.0
    for name, shape in SHAPES.items():
        owed = state["residuals"].get(name, torch.zeros(1, went_in[name].numel())).mean(0)
        gap: Tensor = ranks[0].came_out[name] + owed.view(shape) - went_in[name]
        worst = max(worst, float(gap.abs().max()))
    return worst


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *product(SCHEDULES, [flat(2), flat(3)]),
        *product(["int8, none", "by_name"], FORMS),
    ],
    ids=str,
)
def test_a_switch_conserves_the_sum_and_frees_the_residual(name: str, layout: Layout) -> None:
    codec, left = SCHEDULES[name]
    ranks = run_threads(lambda rank: run(rank, codec, layout=layout), layout.size)
    assert all(each.digests == ranks[0].digests for each in ranks), "replicas"
    assert lost(ranks) < 1e-9
    for each in ranks:
        assert set(each.names) == left
        if layout.tree is None:
            assert (each.memory > 0) == bool(left)
    assert ranks[0].state is not None
    assert set(ranks[0].state["residuals"]) == left
    assert "factors" not in ranks[0].state


@pytest.mark.parametrize("layout", [None, FORMS[0]], ids=str)
def test_a_step_that_is_not_finite_at_the_switch_sends_it_in_the_next(
    layout: Layout | None,
) -> None:
    def given(rank: Rank, step: int) -> Tensors:
        fed = feed(rank.rank, step, dtype=DOUBLE)
        if step in (SWITCH, SWITCH + 1) and rank.rank == 1:
            fed["second"][0, 0] = torch.inf
        return fed

    codec = SCHEDULES["int8, none"][0]
    settings = {"layout": layout, "given": given, "commit": "deferred"}
    ranks = run_threads(lambda rank: run(rank, codec, **settings), 4)
    assert lost(ranks) < 1e-9
    assert all(not each.names for each in ranks)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("last", ["none", "bf16", "fp16", "qsgd:block_size=64"])
@on_threads(2)
def test_residuals_arrive_in_one_step(rank: Rank, last: str, scale: float | None) -> None:
    """With gradients of zero from the switch on."""
    codec = warmup({0: TOPK, 1: last})
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    settings = {"min_compress_numel": 256, "grad_scaler": scaler}
    with compressed(rank, Fed(), codec, **settings) as (model, reducer):

        def step(fed: Tensors) -> Tensors:
            model.zero_grad()
            loss = model(fed)
            (loss if scaler is None else scaler.scale(loss)).backward()
            return {name: got / (scale or 1.0) for name, got in gradients(model).items()}

        step(feed(rank.rank, 0))
        owed = mean(of_all(rank, residuals(reducer)))
        sent, after = step(zeros), step(zeros)
    assert set(owed) == {"first", "second"}
    for name, value in owed.items():
        error = 0.0 if last == "none" else 2**-8 if "16" in last else 1 / 7
        gap = sent[name].flatten() - value
        assert gap.abs().max() <= value.abs().max() * (error + 1e-6) * 2
        assert not after[name].any()


@pytest.mark.parametrize("layout", [None, *FORMS[:2]], ids=str)
@pytest.mark.parametrize("name", ["int8, none", "powersgd, none"])
def test_a_run_resumed_before_the_switch_sends_it(name: str, layout: Layout | None) -> None:
    """Bit for bit as the run without interruption; and again after the switch."""
    codec, world = SCHEDULES[name][0], 4 if layout else 2

    def train(steps: range, load: State | None = None) -> list[Run]:
        return run_threads(
            lambda rank: run(rank, codec, layout=layout, steps=steps, load=load), world
        )

    whole, before = train(range(STEPS)), train(range(SWITCH))
    after = train(range(SWITCH, STEPS), before[0].state)
    if layout is None:  # inside a host, DDP's first bucket layout adds in another order
        assert [each.digests for each in after] == [each.digests[SWITCH:] for each in whole]
    assert whole[0].state is not None
    assert after[0].state is not None
    assert whole[0].state["residuals"] == after[0].state["residuals"] == {}
    for name, total in before[0].came_out.items():
        gap = total + after[0].came_out[name] - whole[0].came_out[name]
        assert gap.abs().max() < 1e-9


def test_a_codec_without_a_residual_sends_what_a_checkpoint_owes() -> None:
    """Also if its first step is not finite."""
    saved = run_threads(lambda rank: run(rank, "int8", steps=range(2)), 2)

    def given(rank: Rank, step: int) -> Tensors:
        value = torch.inf if step == 2 else 0.0
        return {name: torch.full(shape, value, dtype=DOUBLE) for name, shape in SHAPES.items()}

    loaded = run_threads(
        lambda rank: run(rank, "none", steps=range(2, 4), given=given, load=saved[0].state), 2
    )
    assert saved[0].state is not None
    for name, rows in saved[0].state["residuals"].items():
        assert torch.allclose(loaded[0].came_out[name].flatten(), rows.mean(0), atol=1e-12)
    assert all(not each.names for each in loaded)


@on_threads(2)
def test_the_residual_of_an_unused_parameter_is_kept_until_it_is_used(rank: Rank) -> None:
    arguments = {"ddp": {"find_unused_parameters": True}, "min_compress_numel": 256}
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with compressed(rank, Fed(), warmup({0: TOPK, 1: "none"}), **arguments) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        owed = mean(of_all(rank, residuals(reducer)))["second"]
        backward(model, {name: zeros[name] for name in ("first", "bias")})
        assert set(reducer.residuals) == {"second"}
        got = backward(model, zeros)["second"]
        assert not set(reducer.residuals)
    assert torch.allclose(got.flatten(), owed, atol=1e-6)


@on_threads(2)
def test_momentum_ends_with_the_codec_that_brings_it(rank: Rank) -> None:
    found = run(rank, warmup({0: DGC, SWITCH: "none"}))
    assert not found.names
    assert found.memory == 0
    assert "momenta" not in (found.state or {})


@on_threads(2)
def test_momentum_that_goes_on_does_not_multiply_the_residual(rank: Rank) -> None:
    """Beside ``dgc`` uncompressed tensors have momentum too; a residual of dgc is a sum of momenta.

    With gradients of zero all that comes out is the residual and the tail of the momentum.
    """
    codec = warmup({0: by_size(DGC, min_numel=1), 2: by_size(DGC, min_numel=10_000)})
    zeros = {n: torch.zeros(shape, dtype=DOUBLE) for n, shape in SHAPES.items()}
    with compressed(rank, Fed(dtype=DOUBLE), codec) as (model, reducer):
        for step in range(2):
            backward(model, feed(rank.rank, step, dtype=DOUBLE))
        u, v = reducer.state.momenta["first"], reducer.residuals["first"]
        expected = sum(of_all(rank, v + u * 0.9 / (1 - 0.9))) / 2
        total = sum(backward(model, zeros)["first"] for _ in range(300))
    assert (total.flatten() - expected).abs().max() < 1e-9
