"""Large tensors, which cross in several units, and tensors without a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed, residuals
from layouts import PAIRS, UNEVEN, Layout
from worlds import Rank, run_threads

LARGE = {"large": (1100, 1000), "bias": (600,), "other": (700, 800)}
"""Two owners take 512 Ki elements at a time, so the first is three fragments."""

LAYOUTS = [Layout(PAIRS), Layout(PAIRS, leader=True), Layout(UNEVEN)]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@layouts
def test_chunks_that_follow_each_other_keep_apart(layout: Layout) -> None:
    """While one crosses the next is reduced inside, in memory that every other one uses."""
    form = {**layout.form, "min_compress_numel": 1000}
    mean = {n: sum(feed(r, 1, LARGE)[n] for r in range(4)) / 4 for n in LARGE}

    def body(rank: Rank) -> list[Tensors]:
        found = []
        for codec in ("none", "int8"):
            with compressed(rank, Fed(LARGE), codec, **form) as (model, reducer):
                backward(model, feed(rank.rank, 0, LARGE))
                found.append(backward(model, feed(rank.rank, 1, LARGE)))
                largest = max(len(group.units) for group in reducer._plans.groups())
            assert largest >= 3
        return found

    ranks = run_threads(body, 4)
    for number, tolerance in enumerate((1e-6, 0.1)):
        assert len({digest([r[number][name] for name in LARGE]) for r in ranks}) == 1
        for name, expected in mean.items():
            torch.testing.assert_close(ranks[0][number][name], expected, rtol=0, atol=tolerance)


@dataclass
class Ran:
    """One rank's steps with all gradients, with those of ``bias`` alone, and with most."""

    before: dict[str, str]  # digests of the residuals after the first and after the second step
    after: dict[str, str]
    last: Tensors


@layouts
@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2", "threshold:tau=1.5"])
def test_a_tensor_without_a_gradient_keeps_what_it_owes(codec: str, layout: Layout) -> None:
    """Unused on all ranks nothing of it is applied, on one rank its gradient there is zero."""
    form = {**layout.form, "min_compress_numel": 256}

    def body(rank: Rank) -> Ran:
        ddp = {"find_unused_parameters": True}
        with compressed(rank, Fed(), codec, ddp=ddp, **form) as (model, reducer):

            def owed() -> dict[str, str]:
                return {name: digest([held]) for name, held in residuals(reducer).items()}

            backward(model, feed(rank.rank, 0))
            before = owed()
            unused = backward(model, {"bias": feed(rank.rank, 1)["bias"]})
            assert set(unused) == {"bias"}
            after = owed()
            some = feed(rank.rank, 2)
            if rank.rank == 1:
                del some["second"]
            return Ran(before, after, backward(model, some))

    ranks = run_threads(body, 4)
    assert len({digest([ran.last[name] for name in sorted(ran.last)]) for ran in ranks}) == 1
    for ran in ranks:
        assert set(ran.before) == {"first", "second"}
        assert ran.after == ran.before
        assert set(ran.last) == {"first", "bias", "second"}
        assert ran.last["second"].any()
