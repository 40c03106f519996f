"""The parts of a step beside those of a twin: times are a few instants, and it asks of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from identities import check_identities

from lightning_dist.profiling.analysis.breakdown import analyse
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS
from lightning_dist.profiling.capture.events import (
    BucketTimes,
    ClockRecord,
    Phase,
    RankRecord,
    Span,
    StepRecord,
)
from lightning_dist.profiling.run import RankRun, Run

ATTRIBUTES = ("rank", "begin", "parts", "waited_for")
GROUPS = {"intra": ((0, 1), (2, 3)), "inter": ((0, 2), (1, 3)), "flat": ((0, 1, 2, 3),)}


def drawn_run(rng: random.Random) -> Run:
    ranks = {}
    for rank in range(4):
        offset = rng.randrange(-1000, 1000)
        groups = {n: next(g for g in of if rank in g) for n, of in GROUPS.items()}
        about = RankRecord(rank, 4, f"host-{rank // 2}", groups, clock=0, unix=0.0)
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
