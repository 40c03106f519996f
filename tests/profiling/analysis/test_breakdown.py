"""The parts of a step: planted times come back exactly, beside a twin of a few instants too."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from planted import MS, Planted, check_identities, replace, replaced

from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, timeline, unknown_wait
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import (
    OF_NO_BUCKET,
    BucketTimes,
    ClockRecord,
    Phase,
    RankRecord,
    Span,
    StepRecord,
)
from lightning_dist.profiling.report.tables import facts
from lightning_dist.profiling.run import RankRun, Run

SHIFTS = ({}, {1: 123.456}, {1: -9_999.001}, {1: 1e6})


def in_ms(parts: Analysed) -> dict[str, float]:
    return {name: nanoseconds / MS for name, nanoseconds in parts.parts.items()}


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("late", [50, 100])
def test_a_planted_delay_is_what_the_others_waited(late: float, shift: dict[int, float]) -> None:
    punctual, tardy = analyse(Planted(late={1: late}, shift=shift).run(), 0)
    assert punctual.waited_for == {1: late * MS}
    assert tardy.waited_for == {}
    # Rank 0 came to its first exchange at 33 ms, and had its last gradient at 62 ms.
    assert in_ms(punctual) == {
        "between_steps": 2,
        "forward": 20,
        "backward": 40,
        "exposed_wait": late - 29,
        "exposed_transfer": 60,
        "exposed_codec": 2,
        "exposed_other": 0,
        "optimizer": 5,
        "other": 0,
    }
    assert punctual.ns["hidden"] == 29 * MS
    assert punctual.ns["exchange"] == (late + 60) * MS
    assert punctual.begin == tardy.begin == 0
    # Rank 1's last gradient was there after 30 of the 60 ms of transfer, less 1 of encoding.
    assert in_ms(tardy)["exposed_wait"] == 0
    assert in_ms(tardy)["exposed_transfer"] == 31
    assert tardy.ns["hidden"] == 29 * MS
    for each in (punctual, tardy):
        check_identities(each)


def test_collectives_that_hold_up_a_pass_are_exposed() -> None:
    """FSDP's own, planted in the forward pass: rank 1 comes to it 4 ms late."""
    usual = Planted(nodes=("node-a",)).run()
    run = usual
    for rank, came in ((0, 5), (1, 9)):
        of_rank = run.ranks[rank]
        gather = Span(
            *("exchange", OF_NO_BUCKET, came * MS, 15 * MS, "all_gather", "intra", 500, 0, True)
        )
        groups = {**of_rank.metadata.groups, "intra": [0, 1]}
        steps = {
            step: replace(each, spans=(gather, *each.spans)) for step, each in of_rank.steps.items()
        }
        metadata = replace(of_rank.metadata, groups=groups, fsdp="replicas")
        run = replaced(run, rank, steps=steps, metadata=metadata)
    for before, now, waited in zip(analyse(usual, 0), analyse(run, 0), (4, 0), strict=True):
        expected = in_ms(before)
        expected["forward"] -= 6 + waited
        expected["exposed_wait"] += waited
        expected["exposed_transfer"] += 6
        assert in_ms(now) == expected
        assert now.ns["exposed_fsdp"] == (6 + waited) * MS
        assert before.ns["exposed_fsdp"] == 0
        assert now.ns["hidden"] == before.ns["hidden"]
        assert now.ns["intra"] - before.ns["intra"] == now.ns["raw"] - before.ns["raw"] == 500
        check_identities(now)
    summary = summarize(run)
    assert summary.exposed_fsdp_ms == 8
    assert summary.exposed_ms == pytest.approx(summarize(usual).exposed_ms + 8)
    (fact,) = (each for each in facts(summary) if each.label == "exposed communication")
    assert "8.00 ms of it in collectives of FSDP itself" in fact.detail


def test_of_several_that_came_last_the_lowest_is_named() -> None:
    parts = analyse(Planted(world_size=3, late={1: 50, 2: 50}).run(), 0)
    assert [each.waited_for for each in parts] == [{1: 50 * MS}, {}, {}]


def test_a_clock_that_drifts_within_a_run() -> None:
    planted = Planted(late={1: 50})
    run = planted.run()
    # Rank 1's clock gains 1 ms from each step to the next.
    steps, clocks = {}, []
    for step, record in run.ranks[1].steps.items():
        steps[step] = replace(record, begin=record.begin + step * MS)
        clocks.append(ClockRecord(at=steps[step].begin, offset=-step * MS, uncertainty=1))
    run = replaced(run, 1, steps=steps, clocks=clocks)
    for step in range(planted.steps):
        assert analyse(run, step)[0].waited_for == {1: 50 * MS}


def test_a_mean_after_the_backward_pass_takes_nothing_from_other_phases() -> None:
    run = Planted().run()
    record = run.ranks[0].steps[0]
    late = [replace(each, done=record.duration + MS) for each in record.buckets]
    parts = analyse(replaced(run, 0, steps={0: replace(record, buckets=late)}), 0)[0]
    assert parts.ns["after"] == 0, "the mean came with the end of the step"
    ns = {**parts.ns, "after": 5 * MS}  # of the optimizer
    assert replace(parts, record=record, ns=ns) == analyse(run, 0)[0]
    early = [replace(each, end=70 * MS) if each.name == "backward" else each
             for each in record.phases if each.name != "optimizer"]  # fmt: skip
    record = replace(record, buckets=late, phases=early)
    parts = analyse(replaced(run, 0, steps={0: record}), 0)[0]
    # The mean was never there: all that is left of the step is exposed.
    assert parts.ns["exposed"] == 38 * MS
    check_identities(parts)


@pytest.mark.parametrize("change", [{"group": "foreign"}, {"order": -1}])
def test_an_exchange_that_does_not_say_who_takes_part_is_transfer(
    change: dict[str, object],
) -> None:
    run = Planted(late={1: 50}).run()
    for rank in (0, 1):
        record = run.ranks[rank].steps[0]
        spans = [replace(s, **change) if s.phase == "exchange" else s for s in record.spans]
        run = replaced(run, rank, steps={0: replace(record, spans=spans)})
    assert [each.parts["exposed_wait"] for each in analyse(run, 0)] == [0, 0]
    assert "without recorded members" in unknown_wait(analyse(run, 0))


def test_without_a_comparison_of_clocks_durations_say_who_waited() -> None:
    run = Planted(late={1: 50}, shift={1: 1e6}, uncertainty=None).run()
    punctual, tardy = analyse(run, 0)
    assert punctual.waited_for == {1: 50 * MS}
    assert punctual.parts["exposed_transfer"] == 60 * MS
    assert tardy.waited_for == {}
    # On one node all processes read the same clock.
    same = Planted(late={1: 50}, nodes=["node-a"], uncertainty=None).run()
    assert analyse(same, 0)[0].waited_for == {1: 50 * MS}


def test_a_time_line_is_of_all_ranks_on_one_clock() -> None:
    run = Planted(late={1: 50}, shift={1: 123.456}).run()
    line = timeline(run, 0, "median step")
    assert (line.step, line.label) == (0, "median step")
    assert line.phases[1][1] == ("forward", 2 * MS, 72 * MS)
    assert line.buckets[0][0][:2] == (0, 32 * MS)
    firsts = [next(s for s in line.spans[r] if s.phase == "exchange") for r in (0, 1)]
    assert [s.begin for s in firsts] == [33 * MS, 83 * MS]
    assert [s.arrival for s in firsts] == [83 * MS, 83 * MS]
    assert [s.end for s in firsts] == [98 * MS, 98 * MS]
    assert (firsts[0].op, firsts[0].group, firsts[0].sent) == ("all_gather", "flat", 1_000_000)
    assert {s.arrival for s in line.spans[0] if s.phase != "exchange"} == {None}
    # It begins where the first rank has begun, also in a later step.
    later = timeline(run, 3, "")
    assert min(begin for of in later.phases.values() for _, begin, _ in of) == 0
    staggered = replace(run.ranks[0].steps[0], begin=-7 * MS)
    moved = timeline(replaced(run, 0, steps={0: staggered}), 0, "")
    firsts = [next(s for s in moved.spans[r] if s.phase == "exchange") for r in (0, 1)]
    assert [(s.begin, s.arrival) for s in firsts] == [(33 * MS, 90 * MS), (90 * MS, 90 * MS)]


def test_a_time_line_of_what_there_is() -> None:
    run = Planted().run()
    record = replace(run.ranks[1].steps[0], detailed=False, spans=(), buckets=())
    run = replaced(run, 1, steps={0: record})
    line = timeline(run, 0, "")
    assert len(line.phases[1]) == 4
    assert line.spans[1] == []
    assert {s.arrival for s in line.spans[0]} == {None}
    assert list(timeline(run, 4, "").phases) == [0]
    assert timeline(run, 99, "").phases == {}


ATTRIBUTES = ("rank", "begin", "parts", "waited_for")
GROUPS = {"intra": ((0, 1), (2, 3)), "inter": ((0, 2), (1, 3)), "flat": ((0, 1, 2, 3),)}


def drawn_run(rng: random.Random) -> Run:
    ranks = {}
    for rank in range(4):
        offset = rng.randrange(-1000, 1000)
        groups = {n: next(g for g in of if rank in g) for n, of in GROUPS.items()}
        about = RankRecord(rank, 4, f"node-{rank // 2}", groups, clock=0, unix=0.0)
        steps = {}
        if rng.random() < 0.95:
            steps[0] = drawn_step(rng, begin=rng.randrange(10) - offset)
        if rng.random() < 0.95:
            ranks[rank] = RankRun(about, steps, [ClockRecord(0, offset, 1)])
    return Run(ranks)


def drawn_step(rng: random.Random, *, begin: int) -> StepRecord:
    if rng.random() < 0.05:
        return StepRecord(0, begin, 50, detailed=False)
    passes = ["forward", "backward"] * rng.randrange(1, 4)
    names = [*(["between_steps"] * rng.randrange(2)), *passes, *(["optimizer"] * rng.randrange(2))]
    phases, now = [], 0
    for name in names:
        now += rng.randrange(3)
        end = now + rng.randrange(1, 20)
        phases.append(Phase(name, now, end))
        now = end
    last = next(each for each in reversed(phases) if each.name == "backward")
    duration = now + rng.randrange(3)
    buckets = []
    for index in range(rng.randrange(4)):
        ready = rng.randrange(last.begin, last.end)
        done = rng.randrange(ready, last.end + 1)
        buckets.append(BucketTimes(index, ready, done, 8, 2, 2))
    spans = list(drawn_spans(rng, last.begin, duration))
    return StepRecord(
        0, begin, duration, phases, buckets, sorted(spans, key=lambda each: each.begin)
    )


def drawn_spans(rng: random.Random, since: int, until: int) -> Iterator[Span]:
    def times() -> tuple[int, int]:
        begin = rng.randrange(since, until)
        return begin, rng.randrange(begin, until + 1)

    for _ in range(rng.randrange(3)):
        yield Span(rng.choice(["encode", "decode"]), 0, *times())
    for group in GROUPS:
        for order in range(rng.randrange(3)):
            if rng.random() < 0.95:
                yield Span("exchange", 0, *times(), "all_gather", group, 1, order)


@dataclass
class Twin:
    """What becomes of every instant of a step on a rank, straight from the definitions."""

    run: Run
    rank: int

    def launch(self, rank: int, group: str, order: int) -> int | None:
        of_rank = self.run.ranks.get(rank)
        if of_rank is None or 0 not in of_rank.steps or not of_rank.steps[0].detailed:
            return None
        for span in of_rank.steps[0].spans:
            if (span.group, span.order) == (group, order):
                return of_rank.steps[0].begin + of_rank.clocks[0].offset + span.begin
        return None

    def arrival(self, span: Span) -> tuple[int, int] | None:
        """Since the begin of the step on this rank, and who."""
        of_rank = self.run.ranks[self.rank]
        begin = of_rank.steps[0].begin + of_rank.clocks[0].offset
        launches = {
            member: self.launch(member, span.group, span.order)
            for member in of_rank.metadata.groups[span.group]
        }
        if None in launches.values():
            return None
        latest = max(launches.values())
        return latest - begin, min(m for m, at in launches.items() if at == latest)

    def analysed(self) -> dict[str, Any]:
        of_rank = self.run.ranks[self.rank]
        record = of_rank.steps[0]
        exchanges = [
            (span, self.arrival(span)) for span in record.spans if span.phase == "exchange"
        ]
        ready = max((each.ready for each in record.buckets), default=0)
        done = max((each.done for each in record.buckets), default=0)
        parts = dict.fromkeys(PARTS, 0)
        exchange = hidden = 0
        waited_for: dict[int, int] = {}
        for now in range(record.duration):
            phases = [p.name for p in record.phases if p.begin <= now < p.end]
            exposed = ready <= now < done and phases in ([], ["backward"])
            here = [(s, came) for s, came in exchanges if s.begin <= now < s.end]
            moves = any(came is None or came[0] <= now for _, came in here)
            codec = any(s.phase != "exchange" and s.begin <= now < s.end for s in record.spans)
            if exposed:
                name = (
                    ("exposed_transfer" if moves else "exposed_wait")
                    if here
                    else ("exposed_codec" if codec else "exposed_other")
                )
            else:
                name = phases[0] if phases else "other"
            parts[name] += 1
            exchange += bool(here)
            hidden += bool(here) and not exposed
            if here and not moves:
                _, (_, last) = here[0]
                waited_for[last] = waited_for.get(last, 0) + 1
        begin = record.begin + of_rank.clocks[0].offset
        return {
            "rank": self.rank,
            "begin": begin,
            "parts": parts,
            "exchange": exchange,
            "hidden": hidden,
            "waited_for": waited_for,
        }


def test_every_instant_is_where_the_twin_has_it() -> None:
    seen: set[str] = set()
    for seed in range(300):
        run = drawn_run(random.Random(seed))
        seen |= {"missing rank"} if len(run.ranks) < 4 else set()
        found = analyse(run, 0)
        expected = [
            Twin(run, rank).analysed()
            for rank, each in run.ranks.items()
            if 0 in each.steps and each.steps[0].detailed
        ]
        for each, of_twin in zip(found, expected, strict=True):
            own = {**each.ns, **{name: getattr(each, name) for name in ATTRIBUTES}}
            assert {name: own[name] for name in of_twin} == of_twin, f"seed {seed}"
            check_identities(each)
            waited = sum(each.waited_for.values())
            exposed = each.parts["exposed_wait"]
            assert exposed <= waited <= exposed + each.ns["hidden"], seed
            seen |= {name for name in EXPOSED if each.parts[name]}
            seen |= {"hidden"} if each.ns["hidden"] else set()
            seen |= {"several"} if len(each.waited_for) > 1 else set()
            seen |= {"missing"} if any(x.missing for x in each.exchanges) else set()
    assert seen == {*EXPOSED, "missing rank", "hidden", "several", "missing"}
