"""Clocks that a summary doubts, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted import MS, Planted, replaced

from lightning_dist.profiling.summarize import summarize
from lightning_dist.profiling.traffic import ONE_HOST


@pytest.mark.parametrize(("misread", "is_told"), [(0, False), (3, False), (20, True), (-20, True)])
def test_wrong_clocks_are_told(misread: float, is_told: bool) -> None:
    notes = summarize(Planted(misread={1: misread}).run()).notes
    assert any("clocks may be wrong" in note for note in notes) == is_told
    if misread == 20:
        assert notes == [
            "transfer is 37.5 ms a step by clocks and 60.0 ms by durations: clocks may be wrong, "
            "trust the latter"
        ]


@pytest.mark.parametrize(
    "planted",
    [
        Planted(misread={1: 6}),  # 3 ms a step, and 5 %
        Planted(misread={1: 0.9}, transfer=1),  # 45 %, and 1.8 ms a step
    ],
)
def test_small_differences_between_clocks_and_durations_are_not_told(planted: Planted) -> None:
    assert summarize(planted.run()).notes == []


@pytest.mark.parametrize(("op", "is_told"), [("broadcast", False), ("all_gather", True)])
def test_who_sends_a_broadcast_may_leave_early(op: str, is_told: bool) -> None:
    run = Planted().run()
    for rank, of_rank in run.ranks.items():
        steps = {}
        for step, record in of_rank.steps.items():
            spans = [
                replace(s, op=op, end=s.end if rank else s.begin + MS)
                if s.phase == "exchange"
                else s
                for s in record.spans
            ]
            steps[step] = replace(record, spans=spans)
        run = replaced(run, rank, steps=steps)
    notes = summarize(run).notes
    assert any("clocks may be wrong" in note for note in notes) == is_told


@pytest.mark.parametrize(("uncertainty", "is_told"), [(2.2, False), (2.3, True)])
def test_uncertain_clocks_are_told(uncertainty: float, is_told: bool) -> None:
    notes = summarize(Planted(uncertainty=uncertainty).run()).notes
    assert bool(notes) == is_told
    if is_told:
        assert notes == [
            "clocks are uncertain by 2.30 ms and an exchange takes 22.50 ms: what is waiting and "
            "what transfer is vague"
        ]


def test_clocks_that_were_never_compared_are_told() -> None:
    summary = summarize(Planted(late={1: 50}, shift={1: 1e6}, uncertainty=None).run())
    assert summary.notes == [
        "no clock of rank 1 was compared with rank 0's: who waited follows from how long exchanges "
        "took"
    ]
    assert summary.straggler == 1
    assert summary.ranks[0].wait_ms == pytest.approx(50)
    # Processes of one host read the same clock.
    assert summarize(Planted(hosts=["host-a"], uncertainty=None).run()).notes == [ONE_HOST]
