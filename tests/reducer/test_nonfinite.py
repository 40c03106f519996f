"""Contracts 1 and 3: replicas are equal after every step, and a value that is not finite spoils its
own step on all ranks, and under the deferred commit nothing else. In flat exchanges and where hosts
reduce first; ``test_commit.py`` has the immediate commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    FEW,
    PER_LEVEL,
    SHAPES,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    held,
    residuals,
    step_digest,
)
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, flat
from worlds import Rank, run_threads

from lightning_dist.codecs import resolve_codec

STEPS = 4
Bad = Mapping[int, tuple[int, str, float]]  # step -> rank, parameter, value
WITH_FEEDBACK = [c for c in EVERY_CODEC if not c.startswith(("none", "terngrad"))]
ALL, SOME = [*EVERY_CODEC, *PER_LEVEL], [*FEW, *PER_LEVEL]
LARGE = {"min_compress_numel": 256}  # "bias" is not compressed

OF_FLAT: Bad = {1: (1, "second", torch.inf), 2: (1, "bias", torch.nan)}
EACH_ALONE: list[Bad] = [
    {2: (1, name, value)} for name in ("first", "bias") for value in (torch.inf, torch.nan)
]
# Rank 1 never leads, rank 2 leads in pairs and not of three.
OF_HOSTS: Bad = {1: (1, "second", torch.inf), 2: (2, "bias", torch.nan)}
CASES = [
    (flat(2), WITH_FEEDBACK[::4], OF_FLAT),
    pytest.param(flat(2), WITH_FEEDBACK, OF_FLAT, marks=pytest.mark.slow),
    (flat(3), WITH_FEEDBACK[2::4], OF_FLAT),
    pytest.param(flat(3), WITH_FEEDBACK, OF_FLAT, marks=pytest.mark.slow),
    *((flat(3), ["int8"], bad) for bad in EACH_ALONE),
    *(pytest.param(flat(2), ["int8"], bad, marks=pytest.mark.slow) for bad in EACH_ALONE),
    (Layout(PAIRS), PER_LEVEL, OF_HOSTS),
    pytest.param(Layout(PAIRS), ALL, OF_HOSTS, marks=pytest.mark.slow),
    (Layout(PAIRS, leader=True), SOME, OF_HOSTS),
    (Layout(UNEVEN), SOME, OF_HOSTS),  # uneven hosts are in the leader form
    pytest.param(Layout(UNEVEN), ALL, OF_HOSTS, marks=pytest.mark.slow),
    pytest.param(Layout(HOSTS_OF_FOUR), SOME, OF_HOSTS, marks=pytest.mark.slow),
]


@dataclass
class Ran:
    """Training of one rank, with a bad value in some steps or without those steps."""

    finite: list[dict[str, bool]] = field(default_factory=list)  # gradients of the bad steps
    trace: bool = False  # whether those steps changed any state
    gradients: list[str] = field(default_factory=list)  # digests of all other steps
    all: list[str] = field(default_factory=list)  # of gradients and state


def run(rank: Rank, layout: Layout, codec: str, bad: Bad, *, with_them: bool) -> Ran:
    ran = Ran()
    settings = {"commit": "deferred", **layout.form, **LARGE}
    if layout.tree is None:
        settings["error_feedback"] = True
    with compressed(rank, Fed(), codec, **settings) as (model, reducer):
        for step in range(STEPS):
            given = feed(rank.rank, step)
            if step not in bad:
                gradients = backward(model, given)
                assert all(g.isfinite().all() for g in gradients.values())
                ran.gradients.append(digest([gradients[name] for name in SHAPES]))
                ran.all.append(step_digest(gradients, reducer))
            elif with_them:
                where, name, value = bad[step]
                if rank.rank == where:
                    given[name].view(-1)[-3] = value
                before = [digest([tensor]) for tensor in held(reducer)]
                gradients = backward(model, given)
                ran.finite.append({n: bool(g.isfinite().all()) for n, g in gradients.items()})
                ran.trace |= [digest([tensor]) for tensor in held(reducer)] != before
    return ran


def counts_steps(codec: str) -> bool:
    """Whether the step number, which the bad step has raised, changes what is sent."""
    names = ("powersgd", "randomk", "qsgd", "terngrad", "dgc:ratio=0.1,block_size=128,warm")
    return codec.startswith(names)


def spoilt_together(codec: str, layout: Layout) -> set[str]:
    """Parameters with state; ``bias`` is not compressed, and has momentum beside dgc."""
    of = resolve_codec(codec.split(" > ")[-1])
    kept = of.memory(True if layout.tree is None else "auto").kinds
    if not (kept or of.keeps_factors):
        return set()
    return {"first", "second"} | ({"bias"} if of.momentum_correction else set())


@pytest.mark.parametrize(
    ("layout", "codecs", "bad"), CASES, ids=lambda value: str(value) * isinstance(value, Layout)
)
def test_a_bad_value_spoils_its_step_on_all_ranks_and_leaves_no_trace(
    layout: Layout, codecs: Sequence[str], bad: Bad
) -> None:
    """State stays bit for bit; what follows equals a run in which the steps never were.

    (A second run, where the number of steps counts.) The ranks have equal gradients, other ones in
    every step.
    """

    def body(rank: Rank) -> list[tuple[Ran, Ran]]:
        return [
            (
                run(rank, layout, codec, bad, with_them=True),
                run(rank, layout, codec, bad, with_them=counts_steps(codec)),
            )
            for codec in codecs
        ]

    for codec, *ranks in zip(codecs, *run_threads(body, layout.size), strict=True):
        whole = spoilt_together(codec, layout)
        expected = [{n: n not in {*whole, name} for n in SHAPES} for _, name, _ in bad.values()]
        for spoilt, other in ranks:
            assert spoilt.finite == expected, codec
            assert not spoilt.trace, codec
            assert spoilt.all == other.all, codec
            assert len(set(spoilt.gradients)) == STEPS - len(bad), codec
            assert spoilt.gradients == ranks[0][0].gradients, codec


@pytest.mark.parametrize("size", [2, 3])
def test_without_error_feedback_all_ranks_see_it_too(size: int) -> None:
    """A GradScaler on any rank must skip the step on all of them."""

    def spoilt(rank: int) -> Tensors:
        gradients = feed(rank, 2)
        if rank == 1:
            gradients["first"].view(-1)[-3] = torch.inf
        return gradients

    def body(rank: Rank) -> None:
        for codec in EVERY_CODEC:
            if "dgc" in codec:  # nothing without
                continue
            with compressed(rank, Fed(), codec, error_feedback=False, **LARGE) as (model, reducer):
                backward(model, feed(rank.rank, 0))
                bad = backward(model, spoilt(rank.rank))
                good = backward(model, feed(rank.rank, 3))
                assert not residuals(reducer), codec
                finite = [bool(g["first"].isfinite().all()) for g in (bad, good)]
                assert finite == [False, True], codec

    run_threads(body, size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_that_overflows_does_not_poison_the_residual(size: int) -> None:
    """Every rank is finite, their float32 sum is not: that step may be lost, later ones not."""

    def body(rank: Rank) -> list[bool]:
        with compressed(rank, Fed(), error_feedback=True, **LARGE) as (model, reducer):
            huge = {**feed(rank.rank, 0), "first": torch.full((40, 48), 3e38)}
            backward(model, huge)
            after = backward(model, feed(rank.rank, 1))
            assert all(r.isfinite().all() for r in residuals(reducer).values())
        return [bool(g.isfinite().all()) for g in after.values()]

    assert run_threads(body, size) == [[True] * 3] * size
