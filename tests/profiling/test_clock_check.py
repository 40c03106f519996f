"""Clocks that a summary doubts, and says so."""

from __future__ import annotations

import pytest
from planted import MS, Planted, replace, replaced

from lightning_dist.profiling.analysis.notes import ONE_HOST
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import ClockRecord
from lightning_dist.profiling.run import Run


@pytest.mark.parametrize(("misread", "is_told"), [(0, False), (3, False), (20, True), (-20, True)])
def test_wrong_clocks_are_told(misread: float, is_told: bool) -> None:
    notes = summarize(Planted(misread={1: misread}).run()).notes
    assert any("clocks may be wrong" in note for note in notes) == is_told
    if misread == 20:
        assert notes == [
            "transfer between hosts is 37.5 ms a step by clocks and 60.0 ms by durations: clocks "
            "may be wrong, trust the latter"
        ]


def leaves_late(run: Run, rank: int) -> Run:
    """A rank that sees the ends of its exchanges after the others: its cores are busy."""
    steps = {}
    for number, step in run.ranks[rank].steps.items():
        spans = [
            replace(each, end=each.end + 60 * MS) if each.phase == "exchange" else each
            for each in step.spans
        ]
        steps[number] = replace(step, spans=spans)
    return replaced(run, rank, steps=steps)


@pytest.mark.parametrize(
    ("hosts", "uncertainty", "is_told"),
    [
        (["a"], None, False),
        (["a"], 0, False),
        (["a", "b"], 0, False),  # two names of one machine
        (["a", "b"], 0.02, True),
    ],
)
def test_one_clock_is_not_wrong(hosts: list[str], uncertainty: float | None, is_told: bool) -> None:
    run = leaves_late(Planted(hosts=hosts, uncertainty=uncertainty).run(), 1)
    assert any("clocks may be wrong" in note for note in summarize(run).notes) == is_told


@pytest.mark.parametrize(("group", "is_told"), [("intra", False), ("inter", True)])
def test_only_exchanges_between_clocks_can_be_wrong(group: str, is_told: bool) -> None:
    """Ranks 2 and 3 are of another host than rank 0, and share a clock with each other."""
    run = Planted(world_size=4, hosts=["a", "a", "b", "b"]).run()
    for rank, each in run.ranks.items():
        here = [rank // 2 * 2, rank // 2 * 2 + 1]
        groups = {"intra": here, "inter": [rank % 2, rank % 2 + 2]}
        steps = {
            number: replace(
                step,
                spans=[replace(s, group=group) if s.group else s for s in step.spans],
            )
            for number, step in each.steps.items()
        }
        run = replaced(run, rank, metadata=replace(each.metadata, groups=groups), steps=steps)
        if rank == 1:  # as it is read: of the first rank of the machine
            run = replaced(run, rank, clocks=[ClockRecord(0, 0, 0)])
    notes = summarize(leaves_late(run, 3)).notes
    assert any("clocks may be wrong" in note for note in notes) == is_told


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
            "clocks are uncertain by 2.30 ms and an exchange takes 22.50 ms: the split into "
            "waiting and transfer is uncertain"
        ]


def test_clocks_that_were_never_compared_are_told() -> None:
    summary = summarize(Planted(late={1: 50}, shift={1: 1e6}, uncertainty=None).run())
    assert summary.notes == [
        "no clock of rank 1 was compared with rank 0's: waiting is estimated from the duration of "
        "exchanges"
    ]
    assert summary.straggler == 1
    assert summary.ranks[0].wait_ms == pytest.approx(50)
    # Processes of one host read the same clock.
    assert summarize(Planted(hosts=["host-a"], uncertainty=None).run()).notes == [ONE_HOST]
