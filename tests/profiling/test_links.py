"""Measured bandwidth and clocks: threads, planted links and offsets, nodes that share a link."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from linked_hosts import PlantedClock, read_row
from planted import MS, Planted, changed, replace, replaced
from threads import of_all, on_threads
from worlds import ALL_GATHER, Rank, run_threads

from benchmarks.harness.testbed import Testbed, TestbedUnavailable, shape
from lightning_dist.base.private import destroy_group
from lightning_dist.profiling import links as clocks
from lightning_dist.profiling.analysis.notes import ONE_NODE
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import BurstRecord, ClockRecord, LinkRecord, Span
from lightning_dist.profiling.links import (
    OPS,
    Measurement,
    measure,
    measure_burst,
    pairs,
    read_offset,
)
from lightning_dist.profiling.run import RankRun, Run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.ranks.agreement import new_group_of_all

SCRIPT = Path(__file__).with_name("linked_hosts.py")
FAST, SLOW = 200.0, 100.0
"""Of the links of nodes 0 and 1, and of node 2, in Mbit/s."""
PAYLOAD = 1448 / 1514
"""Of a full frame, which is what the shaper counts: the rest is headers."""
NEAR = 0.2
"""A busy machine gets less, and after a break more: a shaped link saves up 10 ms.
How exact it is without that, benchmarks/profiler measures."""
EXACT = (1 - NEAR) * PAYLOAD
LEAST = {"all_reduce": EXACT, "broadcast": EXACT, "all_gather": 0.3, "all_to_all": 0.3}
"""Of the link. gloo was seen to reach from half of it to all with the last two: these send large
pieces in both directions over one connection."""


@pytest.fixture(scope="module")
def links(quick_python: list[str]) -> list[dict[str, Any]]:
    """What every rank printed."""
    try:
        with Testbed(hosts=3, link_mbit=FAST) as testbed:
            switch = testbed.namespace(0).removesuffix("h0") + "sw"
            shape(switch, "h2", rate_mbit=SLOW)
            shape(testbed.namespace(2), "eth0", rate_mbit=SLOW)
            printed = testbed.launch([*quick_python, str(SCRIPT), "links"], timeout_s=90)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    return [json.loads(text.strip().splitlines()[-1]) for text in printed]


@pytest.mark.root
@pytest.mark.parametrize("op", LEAST)
def test_a_planted_rate_is_found(links: list[dict[str, Any]], op: str) -> None:
    assert LEAST[op] * FAST <= links[0]["found"][op] <= (1 + NEAR) * FAST * PAYLOAD
    assert links[1]["found"] == links[0]["found"]


@pytest.mark.root
def test_the_slow_link_is_found(links: list[dict[str, Any]]) -> None:
    rates = links[2]["pairs"]
    assert rates == links[0]["pairs"]
    for i, row in enumerate(rates):
        for j, rate in enumerate(row):
            if i == j:
                assert rate is None
            else:
                planted = SLOW if 2 in (i, j) else FAST
                assert rate == pytest.approx(planted * PAYLOAD, rel=NEAR), (i, j)


@pytest.mark.root
def test_a_burst_is_not_the_rate_of_a_link(quick_python: list[str]) -> None:
    """At 1 Gbit/s a shaped link saves up 1.25 MB, which pass at once after each pause."""
    try:
        with Testbed(hosts=2, link_mbit=1000.0) as testbed:
            printed = testbed.launch([*quick_python, str(SCRIPT), "burst"], timeout_s=60)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    rates = [rate for text in printed for rate in json.loads(text.strip().splitlines()[-1])]
    assert len(rates) == 4  # of all nodes on each of them, and of the pairs
    assert max(rates) < (1 + NEAR) * 1000 * PAYLOAD


@on_threads(3)
def test_every_rank_has_the_same_result(rank: Rank) -> None:
    group = rank.group("payload")
    measured = [measure(group, op, 12_005, 3) for op in OPS]
    rates = pairs(group, 1000, iterations=1)
    assert of_all(rank, (measured, rates)) == [(measured, rates)] * 3
    assert [each.op for each in measured] == list(OPS)
    for each in measured:  # three times 1000 numbers, and what is left over is not sent
        assert (each.nbytes, each.count, each.ranks) == (12_000, 3000, 3)
        assert len(each.seconds) == 3
        assert all(seconds > 0 for seconds in each.seconds)
    unknown = [[rate is None for rate in row] for row in rates]
    assert unknown == [[i == j for j in range(3)] for i in range(3)]


@pytest.mark.parametrize(
    ("op", "sent"),
    [("all_reduce", 6e6), ("all_gather", 3e6), ("all_to_all", 3e6), ("broadcast", 4e6)],
)
def test_rates_are_those_of_nccl_tests(op: str, sent: int) -> None:
    found = Measurement(op, nbytes=4_000_000, ranks=4, seconds=(9.0, 1e-3, 2e-3))
    assert found.median == 2e-3
    assert found.algbw_gbps == pytest.approx(16)
    assert found.sent == sent
    assert found.busbw_gbps == pytest.approx(sent * 8e-9 / 2e-3)


@pytest.mark.slow
@pytest.mark.on_ranks(2)
def test_a_group_may_end_right_after_its_last_collective() -> None:
    """Before torch 2.9 the second or third waited for ever."""
    numbers = torch.zeros(1000)
    for _ in range(10):
        group = new_group_of_all("ends")
        both = [torch.empty(1000) for _ in range(2)]
        works = [dist.all_gather(both, numbers, group=group, async_op=True) for _ in range(3)]
        for work in works:
            assert work is not None
            work.wait()
        destroy_group(group)


@on_threads(2)
def test_what_cannot_be_measured(rank: Rank) -> None:
    group, alone = rank.group("payload"), rank.group("alone", [rank.rank])
    for call, rule in [
        (lambda: measure(group, "gather", 100, 1), "op must be one of all_reduce, all_gather"),
        (lambda: measure(group, "all_reduce", 7, 1), "nbytes must be 8 or more"),
        (lambda: measure(group, "all_reduce", 100, 0), "iterations must be 1 or more, got 0"),
        (lambda: measure(alone, "all_reduce", 100, 1), "2 ranks or more, got 1"),
        (lambda: pairs(alone, 100), "2 ranks or more, got 1"),
        (lambda: pairs(group, 0), "nbytes must be 1 or more, got 0"),
    ]:
        with pytest.raises(ValueError, match=rule):
            call()


@pytest.mark.parametrize("count", [1, 8])
def test_a_burst_takes_as_long_as_on_its_slowest_rank(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, calls = getattr(dist, ALL_GATHER), Counter[int]()

    def slowly(*arguments: Any, group: dist.ProcessGroup, **named: Any) -> Any:
        calls[group.rank()] += 1
        time.sleep(0.01 if group.rank() == 1 else 0)
        return gather(*arguments, group=group, **named)

    monkeypatch.setattr(dist, ALL_GATHER, slowly)

    def work(rank: Rank) -> BurstRecord:
        return measure_burst(rank.group("payload"), name="flat", count=count)

    found = run_threads(work, 3)
    assert {each.seconds for each in found} == {found[0].seconds}
    for each in found:
        assert (each.group, each.op, each.sent, each.count) == ("flat", "all_gather", 8192, count)
        assert 0.01 * count <= each.seconds < 0.01 * count + 5
        assert each.cpu > 0
    assert calls == {rank: 7 * count for rank in range(3)}  # two uses warm up, five count


SENT = 1_000_000
TOOK = 15  # milliseconds
RATE = SENT * 8 / (TOOK * MS)  # Gbit/s


def taking_turns(*, apart: int = TOOK) -> Run:
    """Two nodes of two ranks: on each the second begins to send ``apart`` ms after the first."""
    nodes, shift = ["a", "a", "b", "b"], {2: 700.0, 3: 700.0}
    run = Planted(world_size=4, nodes=nodes, shift=shift, buckets=1, sent=SENT).run()

    def later(span: Span, turn: int) -> Span:
        begin = span.begin + turn * apart * MS
        return replace(span, group="inter", begin=begin, end=begin + TOOK * MS)

    for rank, each in run.ranks.items():
        turn = rank % 2
        groups = {"intra": [rank - turn, rank - turn + 1], "inter": [turn, turn + 2]}
        steps = {
            number: replace(step, spans=[later(s, turn) if s.op else s for s in step.spans])
            for number, step in each.steps.items()
        }
        link = LinkRecord("inter", sent=SENT, seconds=TOOK / 1e3)
        about = replace(each.metadata, groups=groups)
        run = replaced(run, rank, metadata=about, steps=steps, links=[link])
    return run


@pytest.mark.parametrize(("apart", "rate"), [(TOOK, RATE), (0, 2 * RATE), (5, 1.5 * RATE)])
def test_ranks_of_a_host_that_send_one_after_the_other_share_its_link(
    apart: int, rate: float
) -> None:
    run = taking_turns(apart=apart)
    traffic = summarize(run).traffic
    assert traffic is not None
    assert traffic.link_gbps == pytest.approx(RATE)
    assert traffic.wire_gbps == pytest.approx(rate)
    assert observe(run).scenario.link.rate == pytest.approx(rate * 1e9 / 8)


SECOND = 1000 * MS
HOUR = 3600 * SECOND
ABOUT = Planted(steps=0).run().ranks[1].metadata
SAYS = 120_000
"""Nanoseconds of a usual reading."""


def reads(*clocks: ClockRecord) -> RankRun:
    return RankRun(ABOUT, {}, clocks=clocks)


def test_a_clock_is_less_certain_the_longer_ago_it_was_read() -> None:
    run = reads(ClockRecord(0, 5, SAYS))
    assert (run.offset(HOUR), run.offset(-HOUR)) == (5, 5)
    assert run.uncertainty(0) == SAYS
    # Two quartz clocks may part by 50 ppm each.
    for at in (HOUR, -HOUR):
        assert run.uncertainty(at) == SAYS + HOUR // 10_000
    assert run.uncertainty(HOUR) < run.uncertainty(2 * HOUR)


def test_a_drift_that_two_readings_tell_goes_on_before_and_after_them() -> None:
    drift = 40  # nanoseconds in a millisecond
    later = 600 * SECOND
    run = reads(ClockRecord(0, 0, SAYS), ClockRecord(later, later * drift // MS, SAYS))
    for at in (-HOUR, later // 2, later + HOUR):
        assert run.offset(at) == at * drift // MS
    assert run.uncertainty(0) == run.uncertainty(later) == SAYS
    assert SAYS <= run.uncertainty(later // 2) < 2 * SAYS + MS
    beyond = run.uncertainty(later + HOUR)
    assert beyond is not None
    # The drift is known to twice that in ten minutes; alone a reading would say 360 ms.
    assert SAYS + 12 * SAYS <= beyond < 10 * MS


def test_readings_that_are_too_close_tell_no_drift() -> None:
    run = reads(ClockRecord(0, 0, SAYS), ClockRecord(MS, SAYS, SAYS))
    assert run.offset(HOUR) == SAYS
    assert run.uncertainty(MS + HOUR) == SAYS + HOUR // 10_000


def test_the_clock_of_rank_0_is_certain_for_ever() -> None:
    run = reads(ClockRecord(0, 0, 0), ClockRecord(SECOND, 0, 0))
    assert [run.uncertainty(at) for at in (-HOUR, 7, HOUR)] == [0, 0, 0]
    assert reads().uncertainty(7) is None


@given(
    shift=st.integers(-HOUR, HOUR),
    drift=st.integers(-100, 100),
    readings=st.lists(
        st.tuples(st.integers(0, HOUR), st.integers(1, 50 * MS), st.floats(-1, 1)),
        min_size=1,
        max_size=4,
        unique_by=lambda each: each[0],
    ),
    at=st.integers(-HOUR, 2 * HOUR),
)
def test_no_clock_is_further_off_than_it_says(
    shift: int, drift: int, readings: list[tuple[int, int, float]], at: int
) -> None:
    def truth(at: int) -> int:
        return shift + at * drift // 1_000_000

    clocks = [
        ClockRecord(when, truth(when) + round(error * says), says)
        for when, says, error in sorted(readings)
    ]
    run = reads(*clocks)
    says = run.uncertainty(at)
    assert says is not None
    assert abs(run.offset(at) - truth(at)) <= says + 5  # nanoseconds of rounding


def an_hour_later(run: Run) -> Run:
    """Its steps; clocks were read at the begin, and the training was killed."""
    for rank, each in run.ranks.items():
        run = replaced(run, rank, clocks=each.clocks[:1])
    return changed(run, lambda step: replace(step, begin=step.begin + HOUR))


def test_a_run_that_was_killed_says_how_uncertain_its_clocks_are() -> None:
    planted = Planted(late={1: 50}, uncertainty=SAYS / MS)
    finished, killed = summarize(planted.run()), summarize(an_hour_later(planted.run()))
    assert finished.ranks[1].clock_uncertainty_ms == pytest.approx(SAYS / MS, abs=0.01)
    assert finished.straggler == 1
    assert finished.notes == []
    assert killed.ranks[1].clock_uncertainty_ms == pytest.approx(360, abs=1)
    assert killed.straggler is None
    assert "the clock uncertainty is as large as" in killed.unavailable["straggler"]
    (note,) = killed.notes
    assert note.startswith("clocks are uncertain by 360 ms")


FOUR = ["a", "b", "c", "d"]
ROWS: dict[str, dict[str, Any]] = {
    "shifted": {"shifts": [0, HOUR, -HOUR, 12_345], "machines": FOUR},
    "rank 0 is shifted": {"shifts": [-HOUR, 0, 0, 5_000_000], "machines": FOUR},
    "drifting": {"shifts": [7, HOUR, 0, -99], "drifts": [0, 200, -200, 50], "machines": FOUR},
    "rank 0 drifts": {"shifts": [0, 0, 0, 0], "drifts": [150, 0, 0, -150], "machines": FOUR},
    "two machines": {"shifts": [0, HOUR, 0, HOUR], "machines": ["a", "b", "a", "b"]},
    "one question": {"shifts": [0, 1, 2, 3], "machines": FOUR, "arguments": {"rounds": 1}},
    "busy": {"shifts": [0, HOUR, -HOUR, 0], "machines": FOUR, "busy": 4_000_000},
    "what the kernel says": {"shifts": [0, 0, 0, 0]},
}
LINKED: dict[str, dict[str, Any]] = {
    "idle": {"shifts": [5, -HOUR], "drifts": [0, 100], "machines": FOUR},
    "busy": {"shifts": [0, HOUR], "machines": FOUR, "busy": 1_000_000},
    "what the kernel says": {"shifts": [0, 0]},
}
"""Of two nodes with 200 Mbit/s each."""
Reading = dict[str, int]
Readings = dict[str, Sequence[Reading]]


@pytest.fixture(scope="module")
def readings() -> Readings:
    """What every rank reads, by row."""

    def read(rank: Rank) -> list[Reading]:
        groups = rank.group("clocks"), rank.group("bulk")
        found = []
        for row in ROWS.values():
            found.append(read_row(row, rank.rank, *groups))
            rank.barrier.wait()
        return found

    return dict(zip(ROWS, zip(*run_threads(read, 4), strict=True), strict=True))


@pytest.fixture(scope="module")
def linked(quick_python: list[str]) -> Readings:
    argv = [*quick_python, str(SCRIPT), "clocks", *map(json.dumps, LINKED.values())]
    try:
        with Testbed(hosts=2, link_mbit=200) as testbed:
            printed = testbed.launch(argv, timeout_s=90)
            ranks = [json.loads(text.strip().splitlines()[-1]) for text in printed]
            return dict(zip(LINKED, zip(*ranks, strict=True), strict=True))
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))


def require_true(row: dict[str, Any], found: Sequence[Reading]) -> None:
    """Every offset is right, give or take its own uncertainty."""
    drifts = row.get("drifts", [0] * 4)
    clocks = [PlantedClock(*each) for each in zip(row["shifts"], drifts, strict=False)]
    assert found[0]["offset"] == found[0]["uncertainty"] == 0
    for clock, reading in zip(clocks, found, strict=True):
        truth = clocks[0].at(clock.true(reading["at"])) - reading["at"]
        assert abs(reading["offset"] - truth) <= reading["uncertainty"] + 1  # nanosecond of `true`


@pytest.mark.parametrize("name", ROWS)
def test_offsets_are_as_planted(readings: Readings, name: str) -> None:
    require_true(ROWS[name], readings[name])
    if ROWS[name].get("machines") == FOUR:
        assert all(each["uncertainty"] > 0 for each in readings[name][1:])


@pytest.mark.root
@pytest.mark.parametrize("name", LINKED)
def test_offsets_between_hosts_are_as_planted(linked: Readings, name: str) -> None:
    require_true(LINKED[name], linked[name])


def test_one_rank_of_a_machine_asks_for_all(readings: Readings) -> None:
    first, second, third, fourth = readings["two machines"]
    facts = ("at", "offset", "uncertainty")
    assert [first[name] for name in facts] == [third[name] for name in facts]
    assert [second[name] for name in facts] == [fourth[name] for name in facts]
    assert (third["calls"], fourth["calls"]) == (1, 1)
    assert second["calls"] > 1, "how often a busy machine leaves to the time that it has"


def test_as_many_questions_as_rounds(readings: Readings) -> None:
    calls = [each["calls"] for each in readings["one question"]]
    assert calls == [1 + 3, 1 + 1 + 2, 1 + 1 + 2, 1 + 1 + 2]


def test_ranks_of_one_kernel_need_no_answer(readings: Readings, linked: Readings) -> None:
    for found in (readings["what the kernel says"], linked["what the kernel says"]):
        assert [(each["offset"], each["uncertainty"]) for each in found] == [(0, 0)] * len(found)
        assert len({each["at"] for each in found}) == 1


def read_scripted(shown: Sequence[Sequence[int]], **arguments: int) -> list[ClockRecord]:
    """What ranks read whose clocks show these numbers, one after the other."""

    def one(rank: Rank) -> ClockRecord:
        clock, name = iter(shown[rank.rank]).__next__, str(rank.rank)
        return read_offset(rank.group("clocks"), clock=clock, machine=name, **arguments)

    return run_threads(one, len(shown))


def test_the_answer_that_came_back_fastest_counts() -> None:
    trips = [0, 100, 200, 211, 600, 650]
    found = read_scripted([[0, 1_000, 2_000, 3_000], [0, 0, *trips]], rounds=3)
    assert found[1] == ClockRecord(at=205, offset=2_000 - 205, uncertainty=6)


def test_no_more_questions_where_an_answer_takes_long() -> None:
    trips = [0, 300_000_000, 400_000_000, 400_000_010]
    assert read_scripted([[0, 7, 8], [0, 0, *trips]])[1].at == 400_000_005


def test_a_kernel_that_does_not_tell_shares_its_clock_with_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert clocks.this_machine() == clocks.this_machine()
    monkeypatch.setattr(clocks, "_BOOT", tmp_path / "boot_id")
    one = clocks.this_machine()
    monkeypatch.setattr(clocks.os, "getpid", lambda: -1)
    assert clocks.this_machine() != one


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
    # Processes of one node read the same clock.
    assert summarize(Planted(nodes=["node-a"], uncertainty=None).run()).notes == [ONE_NODE]
