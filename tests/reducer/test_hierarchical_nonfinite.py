"""Contract 3 where hosts reduce first: a bad value on any rank spoils its step and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from feeding import (
    EVERY_CODEC,
    PER_LEVEL,
    SHAPES,
    Fed,
    backward,
    compressed,
    digest,
    feed,
    held,
    step_digest,
)
from layouts import FORMS as LAYOUTS
from layouts import Layout, every_case
from worlds import Rank, run_threads

SETTINGS = {"min_compress_numel": 256}
BAD_STEP, STEPS = 1, 3
ALL, SOME = [*EVERY_CODEC, *PER_LEVEL], ["int8", *PER_LEVEL]
CODECS_OF = [ALL, SOME, ALL, SOME]  # uneven hosts are in the leader form
BAD = [(1, "second", torch.inf), (2, "bias", torch.nan)]
"""Rank, parameter, value. Rank 1 never leads, rank 2 leads in pairs and not of three."""

every = every_case(LAYOUTS, CODECS_OF)


@dataclass
class Ran:
    """One rank's training of ``STEPS`` steps."""

    finite: dict[str, bool] = field(default_factory=dict)  # gradients of the bad step
    trace: bool = False  # whether that step changed any state
    digests: list[str] = field(default_factory=list)  # of all other steps


def run(rank: Rank, layout: Layout, codec: str, bad: tuple[int, str, float] | None) -> Ran:
    """Train; one rank overflows in the bad step, or that step never is."""
    ran, form = Ran(), {"tree": layout.tree, "leader": layout.leader}
    with compressed(rank, Fed(), codec, **form, **SETTINGS) as (model, reducer):
        for step in range(STEPS):
            given = feed(rank.rank, step)
            if step != BAD_STEP:
                ran.digests.append(step_digest(backward(model, given), reducer))
            elif bad is not None:
                where, name, value = bad
                if rank.rank == where:
                    given[name].view(-1)[-3] = value
                before = list(map(digest, ([t] for t in held(reducer))))
                gradients = backward(model, given)
                ran.finite = {n: bool(g.isfinite().all()) for n, g in gradients.items()}
                ran.trace = list(map(digest, ([t] for t in held(reducer)))) != before
    return ran


@cache
def world(number: int) -> dict[str, list[list[Ran]]]:
    """``{codec: [rank][run]}``: without the bad step, then with each of ``BAD``."""
    layout, codecs = LAYOUTS[number], CODECS_OF[number]

    def body(rank: Rank) -> list[list[Ran]]:
        return [[run(rank, layout, codec, bad) for bad in (None, *BAD)] for codec in codecs]

    of_codecs = zip(*run_threads(body, layout.size), strict=True)
    return {codec: list(ranks) for codec, ranks in zip(codecs, of_codecs, strict=True)}


def counts_steps(codec: str) -> bool:
    """Whether the step number, which the bad step has raised, changes what is sent."""
    names = ("powersgd", "randomk", "qsgd", "terngrad", "dgc:ratio=0.1,block_size=128,warm")
    return codec.startswith(names)


@every
def test_a_bad_value_on_any_rank_is_seen_by_all_and_leaves_no_trace(
    number: int, codec: str
) -> None:
    for clean, *bad in world(number)[codec]:
        for ran, (_, name, _) in zip(bad, BAD, strict=True):
            assert ran.finite == {n: n != name for n in SHAPES}
            assert not ran.trace
            if not counts_steps(codec):
                assert ran.digests == clean.digests
