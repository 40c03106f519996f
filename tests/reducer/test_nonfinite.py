"""Contract 3: one value that is not finite spoils its own step on all ranks, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from feeding import (
    EVERY_CODEC,
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
from worlds import Rank, run_threads

BAD_STEP, STEPS = 2, 5
WITH_FEEDBACK = [c for c in EVERY_CODEC if not c.startswith(("none", "terngrad"))]
SETTINGS = {"min_compress_numel": 256, "error_feedback": True}  # "bias" is not compressed


def spoilt(rank: int, name: str, value: float) -> Tensors:
    """Rank 1's gradient of ``name`` has one bad value, rank 0's has none."""
    gradients = feed(rank, BAD_STEP)
    if rank == 1:
        gradients[name].view(-1)[-3] = value
    return gradients


@dataclass
class Ran:
    """One rank's training of ``STEPS`` steps."""

    finite: dict[str, bool] = field(default_factory=dict)  # gradients of the bad step
    trace: bool = False  # whether that step changed a residual
    digests: list[str] = field(default_factory=list)  # of all other steps


def run(rank: Rank, codec: str, bad: tuple[str, float] | None) -> Ran:
    """Train; in the bad step rank 1 overflows in ``bad``, or that step never is."""
    ran = Ran()
    with compressed(rank, Fed(), codec, **SETTINGS) as (model, reducer):
        for step in range(STEPS):
            if step != BAD_STEP:
                gradients = backward(model, feed(rank.rank, step))
                ran.digests.append(step_digest(gradients, reducer))
            elif bad is not None:
                before = digest(held(reducer))
                gradients = backward(model, spoilt(rank.rank, *bad))
                ran.finite = {n: bool(g.isfinite().all()) for n, g in gradients.items()}
                ran.trace = digest(held(reducer)) != before
    return ran


def counts_steps(codec: str) -> bool:
    """Whether the step number, which the bad step has raised, changes what is sent."""
    return codec.startswith(("powersgd", "randomk", "qsgd", "dgc:ratio=0.1,block_size=128,warm"))


@cache
def without_the_bad_step(size: int, codec: str) -> list[list[str]]:
    return [ran.digests for ran in run_threads(lambda rank: run(rank, codec, None), size)]


def check(size: int, codec: str, name: str, value: float) -> None:
    ranks = run_threads(lambda rank: run(rank, codec, (name, value)), size)
    assert [ran.finite for ran in ranks] == [{n: n != name for n in SHAPES}] * size
    assert not any(ran.trace for ran in ranks)
    if not counts_steps(codec):
        assert [ran.digests for ran in ranks] == without_the_bad_step(size, codec)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["first", "bias"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_bad_value_spoils_its_parameter_on_all_ranks_and_leaves_no_trace(
    size: int, name: str, value: float
) -> None:
    """Residuals stay bit for bit; what follows equals a run in which the step never was."""
    check(size, "int8", name, value)


@pytest.mark.parametrize("codec", [c for c in WITH_FEEDBACK if "int8" not in c])
@pytest.mark.parametrize("size", [2, 3])
def test_the_same_for_every_codec_with_error_feedback(codec: str, size: int) -> None:
    check(size, codec, "second", torch.inf)


@pytest.mark.parametrize("codec", [c for c in EVERY_CODEC if "dgc" not in c])
@pytest.mark.parametrize("size", [2, 3])
def test_without_error_feedback_all_ranks_see_it_too(codec: str, size: int) -> None:
    """A GradScaler on any rank must skip the step on all of them."""

    def body(rank: Rank) -> list[bool]:
        settings = {**SETTINGS, "error_feedback": False}
        with compressed(rank, Fed(), codec, **settings) as (model, reducer):
            backward(model, feed(rank.rank, 0))
            bad = backward(model, spoilt(rank.rank, "first", torch.inf))
            good = backward(model, feed(rank.rank, 3))
            assert not residuals(reducer)
        return [bool(g["first"].isfinite().all()) for g in (bad, good)]

    assert run_threads(body, size) == [[False, True]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_that_overflows_does_not_poison_the_residual(size: int) -> None:
    """Every rank is finite, their float32 sum is not: that step may be lost, later ones not."""

    def body(rank: Rank) -> list[bool]:
        with compressed(rank, Fed(), **SETTINGS) as (model, reducer):
            huge = {**feed(rank.rank, 0), "first": torch.full((40, 48), 3e38)}
            backward(model, huge)
            after = backward(model, feed(rank.rank, 1))
            assert all(r.isfinite().all() for r in residuals(reducer).values())
        return [bool(g.isfinite().all()) for g in after.values()]

    assert run_threads(body, size) == [[True] * 3] * size
