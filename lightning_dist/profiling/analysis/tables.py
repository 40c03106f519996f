"""A run as arrays: nanoseconds and bytes of every step and rank, and of every bucket."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, passes_of, unknown_wait
from lightning_dist.profiling.analysis.clock_quality import groups_of_one_clock
from lightning_dist.profiling.analysis.collectives import Exchange
from lightning_dist.profiling.analysis.intervals import Interval, Intervals, length, union
from lightning_dist.profiling.analysis.parts import PARTS, BucketSummary
from lightning_dist.profiling.capture.events import RankRecord
from lightning_dist.profiling.run import Run

MS = 1e6
"""Nanoseconds in a millisecond; bytes in a megabyte, as links count them."""

COLUMNS = (
    *PARTS,
    "duration",
    "exposed",
    "exchange",  # any was in flight
    "hidden",
    "waited",  # for other ranks, hidden or not
    "late",  # for how long the others, added up, waited for this rank
    "moving",  # any exchange moved, on this rank or to another
    "intra_moving",  # one moved that had another member on this host
    "inter_moving",  # one moved that had a member on another host
    "raw",
    "intra",
    "inter",
    "exchanges",  # their number
    "moved",  # transfers of all exchanges, added up
    "by_clocks",  # transfer between clocks that differ, by comparing them
    "by_durations",  # the same, without
)
BUCKET_COLUMNS = tuple(each.name for each in fields(BucketSummary))[2:]

_PART_OF = {"encode_ms": "exposed_codec", "wait_ms": "exposed_wait", "decode_ms": "exposed_codec"}
"""The part of a step whose reason for being unknown is also that of a bucket's column."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTable:
    """Nanoseconds, bytes and counts of a run: whole numbers, as floats, which sum them exactly.

    Args:
        steps, ranks: two of the axes.
        hosts: of every rank.
        values: by step, rank and :data:`COLUMNS`; NaN: the step was not recorded in detail.
        waited_for: by rank that waited and rank that was late, all steps added up.
        host_moving: by step and host, in the order of ``dict.fromkeys(hosts)``, while any rank of
            it exchanged with other hosts.
        buckets: by index: the codec; how often it was exchanged; sums of :data:`BUCKET_COLUMNS`, in
            nanoseconds and bytes.
        unknown_wait: reason why waiting is not, or not wholly, known; empty: it is.
    """

    steps: Sequence[int]
    ranks: Sequence[int]
    hosts: Sequence[str]
    values: Array
    waited_for: Array
    host_moving: Array
    buckets: Mapping[int, tuple[str, int, Array]]
    unknown_wait: str = ""

    def of(self, *columns: str) -> Array:
        """A column by step and rank, or the sum of several."""
        found: Array = self.values[:, :, [COLUMNS.index(name) for name in columns]].sum(axis=2)
        return found

    def of_ranks(self, *columns: str) -> Array:
        """The same by rank, of all steps."""
        found: Array = self.of(*columns).sum(axis=0)
        return found

    def total(self, *columns: str) -> float:
        """The same, of all steps and ranks."""
        return float(self.of(*columns).sum())

    def mean_ms(self, *columns: str) -> float:
        """The mean over steps and ranks; 0 of nothing."""
        return self.total(*columns) / max(self.cells, 1) / MS

    @property
    def cells(self) -> int:
        """Steps times ranks."""
        return len(self.steps) * len(self.ranks)

    @property
    def has_no_exchange(self) -> bool:
        """No communication was seen in these steps."""
        return self.cells > 0 and not self.buckets and not self.total("exchange")

    def link_uses(self) -> tuple[Array, Array]:
        """Bytes that went out over a link, and nanoseconds in which something was on its way.

        By step and link: that of a host to others, or where nothing goes there, of a rank.
        """
        inter = self.of("inter")
        if not inter.any():
            return self.of("intra"), self.of("intra_moving")
        hosts = np.array(self.hosts)
        links = [inter[:, hosts == host].sum(axis=1) for host in dict.fromkeys(self.hosts)]
        return np.stack(links, axis=1), self.host_moving

    def bucket_summaries(self, unknown: Container[str]) -> list[BucketSummary]:
        """Means of every bucket; a zero of what is ``unknown`` was not measured."""
        found = []
        for index, (codec, count, sums) in sorted(self.buckets.items()):
            means = dict(zip(BUCKET_COLUMNS, (sums / count / MS).tolist(), strict=True))
            for name, part in _PART_OF.items():
                if not means[name] and part in unknown:
                    means[name] = None
            found.append(BucketSummary(index, codec, **means))
        return found


def step_table(
    run: Run, steps: Sequence[int], analysed: Iterable[Sequence[Analysed]] | None = None
) -> StepTable:
    """The table of these steps.

    Args:
        analysed: every step as :func:`~lightning_dist.profiling.analysis.breakdown.analyse` has it,
            where that is there already.
    """
    ranks = {rank: each for rank, each in run.ranks.items() if each.steps}
    rows = {rank: row for row, rank in enumerate(ranks)}
    hosts = [each.metadata.host for each in ranks.values()]
    reach = {rank: _reach(run, each.metadata) for rank, each in ranks.items()}
    one_clock = groups_of_one_clock(run)
    values = np.full((len(steps), len(ranks), len(COLUMNS)), np.nan)
    waited_for = np.zeros((len(ranks), len(ranks)))
    host_moving = np.zeros((len(steps), len(set(hosts))))
    buckets: dict[int, tuple[str, int, Array]] = {}
    unknown = ""
    for i, of_step in enumerate(analysed or (analyse(run, step) for step in steps)):
        of_hosts: dict[str, list[Interval]] = {host: [] for host in hosts}
        late = np.zeros(len(ranks))
        for each in of_step:
            row = rows[each.rank]
            for last, waited in each.waited_for.items():
                late[rows[last]] += waited
                waited_for[row, rows[last]] += waited
        for each in of_step:
            row, (intra, inter) = rows[each.rank], reach[each.rank]
            near, far = _moving_in(each, intra), _moving_in(each, inter)
            own = _row(each, near, far, one_clock[each.rank])
            own["late"] = late[row]
            values[i, row] = [own[name] for name in COLUMNS]
            of_hosts[hosts[row]] += [(each.begin + a, each.begin + b) for a, b in far]
            for index, codec, sums in _bucket_rows(each):
                _, count, before = buckets.get(index, ("", 0, 0.0))
                buckets[index] = codec, count + 1, before + sums
        # Ranks of one host may send at the same time or one after the other: the clock tells.
        host_moving[i] = [length(union(each)) for each in of_hosts.values()]
        unknown = unknown or unknown_wait(of_step)
    return StepTable(steps, list(ranks), hosts, values, waited_for, host_moving, buckets, unknown)


def _row(
    step: Analysed, near: Intervals, far: Intervals, one_clock: Container[str]
) -> dict[str, float]:
    buckets = step.record.buckets
    doubted = [each for each in step.exchanges if each.span.group not in one_clock]
    return {
        **step.parts,
        "duration": step.duration,
        "exposed": step.exposed,
        "exchange": step.union,
        "hidden": step.hidden,
        "waited": sum(step.waited_for.values()),
        "moving": length(step.moving),
        "intra_moving": length(near),
        "inter_moving": length(far),
        "raw": sum(bucket.raw for bucket in buckets),
        "intra": sum(bucket.intra for bucket in buckets),
        "inter": sum(bucket.inter for bucket in buckets),
        "exchanges": len(step.exchanges),
        "moved": sum(each.transfer[1] - each.transfer[0] for each in step.exchanges),
        "by_clocks": length(union(each.transfer for each in doubted)),
        "by_durations": length(union(map(_by_duration, doubted))),
    }


def _by_duration(exchange: Exchange) -> Interval:
    """The time that a collective took the member that came last, at its end.

    That is the least that it took any, and needs no comparison of clocks, only that all members
    leave it together. Where members read one clock that cannot be wrong, and what differs is when
    they leave.
    """
    # The root of a broadcast leaves it before the others have it: its duration says nothing.
    if exchange.shortest is None or exchange.span.op == "broadcast":
        return exchange.transfer
    return exchange.span.end - exchange.shortest, exchange.span.end


def _reach(run: Run, metadata: RankRecord) -> tuple[frozenset[str], frozenset[str]]:
    """Groups of a rank with others of its host, and those with other hosts.

    A rank that has left nothing may be anywhere.
    """
    hosts = {
        name: [
            run.ranks[rank].metadata.host if rank in run.ranks else None
            for rank in members
            if rank != metadata.rank
        ]
        for name, members in metadata.groups.items()
    }
    here = {metadata.host, None}
    near = frozenset(name for name, of in hosts.items() if any(host in here for host in of))
    return near, frozenset(name for name, of in hosts.items() if {*of} - {metadata.host})


def _moving_in(step: Analysed, groups: Container[str]) -> Intervals:
    chosen = [each for each in step.exchanges if each.span.group in groups]
    if len(chosen) == len(step.exchanges):
        return step.moving
    return union(each.moving for each in chosen)


def _bucket_rows(step: Analysed) -> Iterator[tuple[int, str, Array]]:
    """Index, codec and :data:`BUCKET_COLUMNS` of every exchange of all gradients."""
    exchanges: dict[int, list[Exchange]] = {}
    for exchange in step.exchanges:
        exchanges.setdefault(exchange.span.bucket, []).append(exchange)
    coding = [span for span in step.record.spans if span.phase != "exchange"]
    for each in passes_of(step.record):
        coded = {(phase, b.index): 0 for b in each.buckets for phase in ("encode", "decode")}
        for span in coding:
            if (span.phase, span.bucket) in coded and each.has(span.begin):
                coded[span.phase, span.bucket] += span.end - span.begin
        last_ready = each.last_ready
        for bucket in each.buckets:
            own = [x for x in exchanges.get(bucket.index, ()) if each.has(x.span.begin)]
            transfer = union(x.transfer for x in own)
            end = max((x.span.end for x in own), default=bucket.done)
            sums = (
                bucket.raw,
                bucket.intra + bucket.inter,
                bucket.ready,
                coded["encode", bucket.index],
                length(union([*(x.wait for x in own), *transfer])) - length(transfer),
                length(transfer),
                coded["decode", bucket.index],
                max(end - last_ready, 0),
            )
            yield bucket.index, bucket.codec, np.array(sums, dtype=float)


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
