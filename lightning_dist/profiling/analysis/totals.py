"""Sums over steps and ranks, of which a summary takes the means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dist.profiling.analysis.breakdown import Analysed
from lightning_dist.profiling.analysis.intervals import Interval, Intervals, length, union
from lightning_dist.profiling.analysis.parts import BucketSummary, StepParts
from lightning_dist.profiling.analysis.passes import passes_of
from lightning_dist.profiling.capture.events import BucketTimes, RankRecord
from lightning_dist.profiling.run import Run

MS = 1e6
"""Nanoseconds in a millisecond."""

MB = 1e6
"""Bytes in a megabyte, as links count them."""


@dataclass
class RankTotals:
    """One rank over all steps that were looked at; nanoseconds and bytes.

    Args:
        moving: while any exchange moved, on this rank or to another.
        intra_moving: while one moved that had another member on this host.
        inter_moving: while one moved that had a member on another host.
    """

    steps: int = 0
    duration: int = 0
    exposed: int = 0
    union: int = 0
    hidden: int = 0
    moving: int = 0
    intra_moving: int = 0
    inter_moving: int = 0
    raw: int = 0
    intra: int = 0
    inter: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    waited_for: Counter[int] = field(default_factory=Counter)

    @property
    def waited(self) -> int:
        """For all others."""
        return self.waited_for.total()

    def add(self, step: Analysed, reach: Reach) -> None:
        """Count a step of this rank."""
        parts = step.parts
        self.steps += 1
        self.duration += parts.duration
        self.exposed += parts.exposed
        self.union += parts.union
        self.hidden += parts.hidden
        self.parts.update(parts.parts)
        self.waited_for.update(parts.waited_for)
        self.moving += length(step.moving)
        self.intra_moving += length(_moving_in(step, reach.intra))
        self.inter_moving += length(_moving_in(step, reach.inter))
        for bucket in step.record.buckets:
            self.raw += bucket.raw
            self.intra += bucket.intra
            self.inter += bucket.inter


@dataclass(frozen=True)
class Reach:
    """Groups of one rank: those with others of its host, and those with other hosts.

    A rank that has left nothing may be anywhere.
    """

    intra: frozenset[str]
    inter: frozenset[str]

    @classmethod
    def of(cls, run: Run, about: RankRecord) -> Reach:
        """Of the rank that says ``about``."""
        intra, inter = set(), set()
        for name, ranks in about.groups.items():
            for rank in ranks:
                host = run.ranks[rank].about.host if rank in run.ranks else None
                if rank != about.rank and host in (about.host, None):
                    intra.add(name)
                if host != about.host:
                    inter.add(name)
        return cls(frozenset(intra), frozenset(inter))


def moving_of_hosts(run: Run, step: Iterable[Analysed], reach: Mapping[int, Reach]) -> Counter[str]:
    """Nanoseconds of a step in which any rank of a host exchanged with other hosts, by host.

    Ranks of one host may send at the same time or one after the other: the clock tells.
    """
    found: dict[str, list[Interval]] = {}
    for each in step:
        rank, begin = each.parts.rank, each.parts.begin
        found.setdefault(run.ranks[rank].about.host, []).extend(
            (begin + since, begin + until) for since, until in _moving_in(each, reach[rank].inter)
        )
    return Counter({host: length(union(intervals)) for host, intervals in found.items()})


def _moving_in(step: Analysed, groups: frozenset[str]) -> Intervals:
    chosen = [each for each in step.exchanges if each.span.group in groups]
    if len(chosen) == len(step.exchanges):
        return step.moving
    return union(each.moving for each in chosen)


@dataclass
class BucketTotals:
    """One bucket over all steps and ranks that were looked at."""

    codec: str = ""
    count: int = 0
    raw: int = 0
    wire: int = 0
    ready: int = 0
    encode: int = 0
    wait: int = 0
    transfer: int = 0
    decode: int = 0
    exposed: int = 0

    def summary(self, index: int, unknown: Container[str]) -> BucketSummary:
        """The means; what is zero and ``unknown`` was not measured."""
        count = max(self.count, 1)

        def time(part: str, total: int) -> float | None:
            return None if not total and part in unknown else total / count / MS

        return BucketSummary(
            index,
            self.codec,
            raw_mb=self.raw / count / MB,
            wire_mb=self.wire / count / MB,
            ready_ms=self.ready / count / MS,
            encode_ms=time("codec", self.encode),
            wait_ms=time("wait", self.wait),
            transfer_ms=self.transfer / count / MS,
            decode_ms=time("codec", self.decode),
            exposed_ms=self.exposed / count / MS,
        )


def add_buckets(totals: dict[int, BucketTotals], step: Analysed) -> None:
    """Count the buckets of a step of one rank, once for every exchange of all gradients."""
    for each in passes_of(step.record):
        times: dict[int, _Times] = {bucket.index: _Times() for bucket in each.buckets}
        for exchange in step.exchanges:
            of = times.get(exchange.span.bucket)
            if of is not None and each.has(exchange.span.begin):
                of.wait.append(exchange.wait)
                of.transfer.append(exchange.transfer)
                of.end = max(of.end or 0, exchange.span.end)
        for span in step.record.spans:
            of = times.get(span.bucket)
            if of is not None and span.phase in of.codec and each.has(span.begin):
                of.codec[span.phase] += span.end - span.begin
        for bucket in each.buckets:
            total = totals.setdefault(bucket.index, BucketTotals())
            _add_bucket(total, bucket, times[bucket.index], each.last_ready)


@dataclass
class _Times:
    wait: list[Interval] = field(default_factory=list)
    transfer: list[Interval] = field(default_factory=list)
    codec: dict[str, int] = field(default_factory=lambda: {"encode": 0, "decode": 0})
    end: int | None = None


def _add_bucket(total: BucketTotals, bucket: BucketTimes, times: _Times, last_ready: int) -> None:
    moving = union(times.transfer)
    total.codec = bucket.codec
    total.count += 1
    total.raw += bucket.raw
    total.wire += bucket.intra + bucket.inter
    total.ready += bucket.ready
    total.encode += times.codec["encode"]
    total.decode += times.codec["decode"]
    total.transfer += length(moving)
    total.wait += length(union([*times.wait, *moving])) - length(moving)
    end = bucket.done if times.end is None else times.end
    total.exposed += max(end - last_ready, 0)


def mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def slowest(parts: Iterable[StepParts]) -> int | None:
    """The rank that most waiting was for; the lowest of several, None if nobody waited."""
    waits: Counter[int] = Counter()
    for each in parts:
        waits.update(each.waited_for)
    return min(waits, key=lambda rank: (-waits[rank], rank)) if waits else None
