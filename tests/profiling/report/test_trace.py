"""The trace: kept to the rules of its format, and true to what was planted."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import Planted, twice

from lightning_dist.profiling.analysis.breakdown import analyse, timeline
from lightning_dist.profiling.analysis.parts import Timeline, TimelineSpan, lanes, length, union
from lightning_dist.profiling.report.files import write_trace

MS = 1_000_000
US = 1_000
Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """The events of a trace; raises where JSON is not as strict as viewers are."""
    content = json.loads(gzip.decompress(path.read_bytes()), parse_constant=_refuse)
    return list(content["traceEvents"])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def problems(events: list[Event]) -> list[str]:
    """What is wrong, in words."""
    found = [f"unknown phase: {e}" for e in events if e["ph"] not in ("M", "X", "i", "s", "f")]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if times != sorted(times):
        found.append("not in the order of time")
    found += [
        f"not whole microseconds from 0 on: {event}"
        for event in events
        for name in ("ts", "dur")
        if not isinstance(event.get(name, 0), int) or event.get(name, 0) < 0
    ]
    found += [
        f"a flow without a number: {e}" for e in events if not isinstance(e.get("id", 0), int)
    ]
    named = {(e["pid"], e.get("tid")) for e in events if e["name"].endswith("_name")}
    used = {(e["pid"], e.get("tid")) for e in events if e["ph"] in ("X", "i", "s", "f")}
    used |= {(event["pid"], None) for event in events}
    found += [f"no name for {each}" for each in sorted(used - named, key=str)]
    found += [f"a main thread of its own: {each}" for each in used if each[0] == each[1]]
    for thread in sorted(used, key=str):
        if thread[1] is not None:
            of_thread = [e for e in events if (e["pid"], e.get("tid")) == thread]
            found += _misplaced(of_thread)
    return found + _loose_flows(events)


def _misplaced(events: list[Event]) -> list[str]:
    """Slices that neither nest nor are apart, and flows where no slice is open."""
    found = []
    open_until: list[int] = []
    for event in events:
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            if open_until and end > open_until[-1]:
                found.append(f"ends after the slice that it is in: {event}")
            open_until.append(end)
        if event["ph"] in ("s", "f") and not open_until:
            found.append(f"no slice is open: {event}")
    return found


def _loose_flows(events: list[Event]) -> list[str]:
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            ends[event["cat"], event["name"], event["id"]].append(event)
    return [
        f"not from one slice to another: {flow}"
        for flow in ends.values()
        if [each["ph"] for each in flow] != ["s", "f"] or flow[0]["pid"] == flow[1]["pid"]
    ]


def gather(
    begin: float, end: float, *, bucket: int = 0, arrival: float | None = None, **kwargs: Any
) -> TimelineSpan:
    """An exchange; times in milliseconds."""
    came = None if arrival is None else round(arrival * MS)
    known = {} if arrival is None else {"last": 1, "collective_id": bucket}
    values = {"op": "all_gather", "group": "flat", "sent": 1_000_000, **known, **kwargs}
    times = round(begin * MS), round(end * MS)
    return TimelineSpan("exchange", bucket, *times, arrival=came, **values)


def step(
    spans: dict[int, list[TimelineSpan]], *, number: int = 7, label: str = "median step"
) -> Timeline:
    """Ranks with these spans, whose backward pass takes 100 ms."""
    return Timeline(
        number,
        label,
        phases={rank: [("forward", 0, 20 * MS), ("backward", 20 * MS, 120 * MS)] for rank in spans},
        buckets={rank: [(0, 40 * MS, 120 * MS)] for rank in spans},
        spans=spans,
        exposed={rank: [(40 * MS, 120 * MS)] for rank in spans},
    )


@pytest.fixture
def drawn(tmp_path: Path) -> Any:
    """The events of a trace of these steps, which keeps the rules."""

    def draw(*timelines: Timeline, about: dict[int, str] | None = None) -> list[Event]:
        path = tmp_path / "trace.json.gz"
        write_trace(path, timelines, about or {})
        events = events_of(path)
        assert problems(events) == []
        return events

    return draw


def of(events: list[Event], *, rank: int | None = None, **wanted: Any) -> list[Event]:
    return [
        event
        for event in events
        if (rank is None or event["pid"] == rank)
        and all(event.get(name) == value for name, value in wanted.items())
    ]


LATE = {  # rank 1 comes 30 ms after rank 0; both encode for 2 ms and decode for 1 ms
    0: [
        TimelineSpan("encode", 0, 40 * MS, 42 * MS),
        gather(42, 92, arrival=72),
        TimelineSpan("decode", 0, 92 * MS, 93 * MS),
    ],
    1: [
        TimelineSpan("encode", 0, 70 * MS, 72 * MS),
        gather(72, 92, arrival=72),
        TimelineSpan("decode", 0, 92 * MS, 93 * MS),
    ],
}


def test_ranks_are_processes_in_order(drawn: Any) -> None:
    events = drawn(step(LATE), about={0: "node-a", 1: "node-b", 2: "node-b"})
    names = {event["pid"]: event["args"]["name"] for event in of(events, name="process_name")}
    assert names == {0: "rank 0 @ node-a", 1: "rank 1 @ node-b", 2: "rank 2 @ node-b"}
    order = of(events, name="process_sort_index")
    assert {event["pid"]: event["args"]["sort_index"] for event in order} == {0: 0, 1: 1, 2: 2}
    tracks = [event["args"]["name"] for event in of(events, name="thread_name", rank=1)]
    assert tracks == ["step", "phases", "codec", "exchange"]


def test_every_span_is_there_with_its_times(drawn: Any) -> None:
    events = drawn(step(LATE))
    shown = {
        (event["pid"], event["name"]): (event["ts"], event["dur"]) for event in of(events, ph="X")
    }
    assert shown == {
        **{(rank, "step 7 (median step)"): (0, 120_000) for rank in LATE},
        **{(rank, "forward"): (0, 20_000) for rank in LATE},
        **{(rank, "backward"): (20_000, 20_000) for rank in LATE},
        **{(rank, "exposed communication"): (40_000, 80_000) for rank in LATE},
        (0, "encode 0"): (40_000, 2_000),
        (1, "encode 0"): (70_000, 2_000),
        (0, "all_gather 0"): (42_000, 50_000),
        (0, "wait for rank 1"): (42_000, 30_000),
        (0, "transfer"): (72_000, 20_000),
        (1, "all_gather 0"): (72_000, 20_000),
        **{(rank, "decode 0"): (92_000, 1_000) for rank in LATE},
    }
    assert [(e["pid"], e["name"], e["ts"]) for e in of(events, ph="i")] == [
        (0, "ready 0", 40_000),
        (1, "ready 0", 40_000),
    ]


def test_an_exchange_says_what_it_was(drawn: Any) -> None:
    (waited,) = of(drawn(step(LATE)), name="all_gather 0", rank=0)
    assert waited["args"] == {
        "op": "all_gather",
        "group": "flat",
        "bytes": 1_000_000,
        "bucket": 0,
        "wait_ms": 30.0,
        "Mbit/s": 400.0,  # of the 20 ms in which it moved
    }


def test_what_is_not_known_is_said_and_not_zero(drawn: Any) -> None:
    events = drawn(step({0: [gather(30, 50), gather(50, 50, bucket=1)]}))
    (alone,) = of(events, name="all_gather 0")
    assert alone["args"]["wait_ms"] == "not known: not every member has recorded this step"
    assert alone["args"]["Mbit/s"] == 400.0
    (short,) = of(events, name="all_gather 1")
    assert short["args"]["Mbit/s"] == "not known: it took no time"
    assert of(events, cat="wait") == []


def test_arrows_lead_from_the_last_rank_to_those_that_waited(drawn: Any) -> None:
    spans = {rank: [gather(begin, 90, arrival=60)] for rank, begin in enumerate((40, 60, 50))}
    events = drawn(step(spans))
    begins, ends = of(events, ph="s"), of(events, ph="f")
    assert [(event["pid"], event["ts"]) for event in begins] == [(1, 60_000)] * 2
    assert [(event["pid"], event["ts"], event["bp"]) for event in ends] == [
        (0, 60_000, "e"),
        (2, 60_000, "e"),
    ]
    assert {e["name"] for e in of(events, cat="wait")} == {"wait for rank 1"}


def test_who_came_last_is_known_without_clocks(drawn: Any) -> None:
    # Each rank has its own word on when the last had come.
    spans = {0: [gather(40, 90, arrival=60.2)], 1: [gather(60, 90, arrival=60)]}
    events = drawn(step(spans))
    assert [event["pid"] for event in of(events, ph="s")] == [1]
    assert [event["name"] for event in of(events, cat="wait")] == ["wait for rank 1"]


def test_no_arrow_begins_where_nothing_lasts(drawn: Any) -> None:
    events = drawn(step({0: [gather(40, 90, arrival=60)], 1: [gather(60, 60, arrival=60)]}))
    assert of(events, ph="s") == of(events, ph="f") == []
    assert [event["name"] for event in of(events, cat="wait")] == ["wait for rank 1"]


def test_groups_of_two_hosts_are_not_mixed_up(drawn: Any) -> None:
    def within(begin: float, last: int) -> list[TimelineSpan]:
        return [gather(begin, 90, arrival=70, group="intra", last=last, collective_id=last)]

    events = drawn(step({0: within(40, 1), 1: within(70, 1), 2: within(70, 2), 3: within(45, 2)}))
    pairs = zip(of(events, ph="s"), of(events, ph="f"), strict=True)
    assert {(one["pid"], other["pid"]) for one, other in pairs} == {(1, 0), (2, 3)}


def test_a_clock_that_is_off_moves_nothing_beyond_its_span(drawn: Any) -> None:
    spans = {0: [gather(30, 50, arrival=60)], 1: [gather(60, 61, arrival=60)]}
    events = drawn(step(spans))
    (waits,) = of(events, cat="wait")
    assert (waits["ts"], waits["dur"]) == (30_000, 20_000)
    assert of(events, ph="s") == []


def test_exchanges_at_once_are_on_lanes_of_their_own(drawn: Any) -> None:
    spans = [gather(30, 60), gather(40, 70, bucket=1), gather(50, 55, bucket=2)]
    spans += [gather(60, 80, bucket=3), gather(75, 80, bucket=4)]
    events = drawn(step({0: spans}))
    threads = {e["tid"]: e["args"]["name"] for e in of(events, name="thread_name")}
    lane = {e["args"]["bucket"]: threads[e["tid"]] for e in of(events, cat="exchange")}
    expected = ["exchange", "exchange 2", "exchange 3", "exchange", "exchange 2"]
    assert lane == dict(enumerate(expected))


def test_steps_follow_each_other_with_a_gap(drawn: Any) -> None:
    events = drawn(step(LATE), step(LATE, number=40, label="slow step"))
    steps = of(events, cat="step", rank=0)
    assert [event["name"] for event in steps] == ["step 7 (median step)", "step 40 (slow step)"]
    gap = steps[1]["ts"] - steps[0]["ts"] - steps[0]["dur"]
    assert 0 < gap < steps[0]["dur"]
    both = of(events, name="all_gather 0", rank=1)
    assert both[1]["ts"] - both[0]["ts"] == steps[1]["ts"]


def test_a_planted_step_is_drawn_as_planted(drawn: Any) -> None:
    planted = Planted(world_size=4, late={2: 50}, shift={1: 700, 3: -200}, steps=3)
    run = planted.run()
    events = drawn(timeline(run, 0, "first step"), timeline(run, 2, "median step"))
    assert len(of(events, cat="phases")) == (4 + 1) * 4 * 2
    for each in analyse(run, 2):
        shown = of(events, name="exposed communication", rank=each.rank)
        assert shown[1]["dur"] * 1000 == each.ns["exposed"]
        backward = of(events, name="backward", rank=each.rank)
        assert backward[1]["dur"] * 1000 == each.parts["backward"]
    assert len(of(events, cat="exchange")) == len(of(events, ph="i")) == planted.buckets * 4 * 2
    assert len(of(events, cat="codec")) == 2 * planted.buckets * 4 * 2
    waits = of(events, cat="wait")
    assert {(event["pid"], event["name"]) for event in waits} == {
        (rank, "wait for rank 2") for rank in (0, 1, 3)
    }
    assert {event["dur"] for event in waits} == {50_000}
    assert {event["pid"] for event in of(events, ph="s")} == {2}
    assert len(of(events, ph="f")) == len(waits)


def test_every_backward_pass_of_a_step_has_its_exposed_part(drawn: Any) -> None:
    run = twice(Planted(late={1: 50}, shift={1: 700}, steps=3).run())
    events = drawn(timeline(run, 1, "median step"))
    for each in analyse(run, 1):
        shown = of(events, name="exposed communication", rank=each.rank)
        assert len(shown) == 2
        assert sum(event["dur"] for event in shown) * 1000 == each.ns["exposed"]
        backward = of(events, name="backward", rank=each.rank)
        assert sum(event["dur"] for event in backward) * 1000 == each.parts["backward"]


def test_no_steps_are_a_trace_too(drawn: Any) -> None:
    assert of(drawn(about={0: "node-a"}), ph="X") == []


def test_equal_steps_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_trace(tmp_path / name, [step(LATE)], {0: "node-a"})
    one = (tmp_path / "one").read_bytes()
    assert one == (tmp_path / "other").read_bytes()
    assert one[4:8] == bytes(4), "the time of writing is in the file"


TIMES = st.integers(-6, 80).map(lambda halves: halves * US // 2)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any spans, of any clocks."""
    ranks = range(draw(st.integers(1, 3)))
    span = st.tuples(
        st.sampled_from(["encode", "exchange", "decode"]), TIMES, TIMES, st.none() | TIMES
    )
    of_rank = st.lists(span, max_size=6)
    return Timeline(
        draw(st.integers(0, 3)),
        "any",
        phases={rank: [("forward", 0, 9 * US), ("backward", 9 * US, 9999)] for rank in ranks},
        buckets={rank: [(0, draw(TIMES), 9)] for rank in ranks},
        spans={
            rank: [
                TimelineSpan(
                    phase,
                    index % 2,
                    *sorted((one, two)),
                    "all_reduce",
                    "flat",
                    9,
                    arrival=at,
                )
                for index, (phase, one, two, at) in enumerate(draw(of_rank))
            ]
            for rank in ranks
        },
        exposed={rank: union([draw(st.tuples(TIMES, TIMES))]) for rank in ranks},
    )


@given(given_steps=st.lists(timelines(), max_size=3))
def test_any_steps_keep_the_rules(
    tmp_path_factory: pytest.TempPathFactory, given_steps: list[Timeline]
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.json.gz"
    write_trace(path, given_steps, {})
    events = events_of(path)
    assert problems(events) == []
    spans = [span for each in given_steps for of_rank in each.spans.values() for span in of_rank]
    shown = of(events, cat="codec") + of(events, cat="exchange")
    assert len(shown) == len(spans)


@given(spans=st.lists(st.tuples(TIMES, TIMES).map(lambda both: (min(both), max(both)))))
def test_lanes_are_as_few_as_can_be(spans: list[tuple[int, int]]) -> None:
    chosen = lanes(spans)
    for lane in set(chosen):
        on_lane = [span for span, where in zip(spans, chosen, strict=True) if where == lane]
        assert length(union(on_lane)) == sum(end - begin for begin, end in on_lane)
    at_once = [
        sum(begin <= time < end or begin == time == end for begin, end in spans)
        for time, _ in spans
    ]
    assert len(set(chosen)) <= max(at_once, default=0)


@pytest.mark.parametrize(
    ("wanted", "change", "problem"),
    [
        ({"cat": "wait"}, {"dur": 90_000}, "ends after"),
        ({"cat": "wait"}, {"ts": -1}, "from 0 on"),
        ({"cat": "wait"}, {"tid": 5}, "no name"),
        ({"cat": "wait"}, {"ph": "B"}, "unknown phase"),
        ({"cat": "wait"}, {"ts": 42_000.5}, "whole microseconds"),
        ({"cat": "wait"}, {"ts": 80_000}, "order of time"),
        ({"ph": "s"}, {"id": 99}, "not from one slice to another"),
        ({"ph": "f"}, {"id": 99}, "not from one slice to another"),
    ],
    ids=str,
)
def test_the_checker_can_fail(drawn: Any, wanted: Event, change: Event, problem: str) -> None:
    events = drawn(step(LATE))
    (event,) = of(events, **wanted)
    event.update(change)
    assert problem in " ".join(problems(events))
