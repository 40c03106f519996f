"""Clocks that a summary doubts, and says so."""

from __future__ import annotations

import pytest
from planted import Planted

from lightning_dist.profiling.analysis.notes import ONE_HOST
from lightning_dist.profiling.analysis.summarize import summarize


@pytest.mark.parametrize(("uncertainty", "stop_requested"), [(2.2, False), (2.3, True)])
def test_uncertain_clocks_are_reported(uncertainty: float, stop_requested: bool) -> None:
    notes = summarize(Planted(uncertainty=uncertainty).run()).notes
    assert bool(notes) == stop_requested
    if stop_requested:
        assert notes == [
            "clocks are uncertain by 2.30 ms and an exchange takes 22.5 ms: the split into waiting "
            "and transfer is uncertain"
        ]


def test_clocks_that_were_never_compared_are_reported() -> None:
    summary = summarize(Planted(late={1: 50}, shift={1: 1e6}, uncertainty=None).run())
    assert summary.notes == [
        "no clock of rank 1 was compared with rank 0's: waiting is estimated from the duration of "
        "exchanges"
    ]
    assert summary.straggler == 1
    assert summary.ranks[0].wait_ms == pytest.approx(50)
    # Processes of one host read the same clock.
    assert summarize(Planted(hosts=["host-a"], uncertainty=None).run()).notes == [ONE_HOST]
