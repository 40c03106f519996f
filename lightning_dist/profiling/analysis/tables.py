"""A run as arrays: nanoseconds and bytes of every step and rank, and of every bucket."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, passes_of, unknown_wait
from lightning_dist.profiling.analysis.intervals import Interval, difference, length, union
from lightning_dist.profiling.analysis.parts import PARTS, BucketSummary, TimelineSpan
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
    "uncertainty",  # of the clock
    "passes",  # backward passes that exchanged gradients
    "optimizer_steps",  # 1: an optimizer has made one
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

    def total(self, *columns: str) -> float:
        """The same, summed over steps and ranks."""
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
    hosts = {rank: each.metadata.host for rank, each in run.ranks.items() if each.steps}
    rows = {rank: row for row, rank in enumerate(hosts)}
    values = np.full((len(steps), len(rows), len(COLUMNS)), np.nan)
    waited_for = np.zeros((len(rows), len(rows)))
    host_moving = np.zeros((len(steps), len(set(hosts.values()))))
    buckets: dict[int, tuple[str, int, Array]] = {}
    unknown = ""
    for i, of_step in enumerate(analysed or (analyse(run, step) for step in steps)):
        of_hosts: dict[str, list[Interval]] = {host: [] for host in hosts.values()}
        late: Counter[int] = Counter()
        for each in of_step:
            late.update(each.waited_for)
        for each in of_step:
            row, begin, own = rows[each.rank], each.begin, {**each.ns, "late": late[each.rank]}
            values[i, row] = [own[name] for name in COLUMNS]
            for last, waited in each.waited_for.items():
                waited_for[row, rows[last]] += waited
            of_hosts[hosts[each.rank]] += [(begin + a, begin + b) for a, b in each.inter_moving]
            for index, codec, sums in _bucket_rows(each):
                _, count, before = buckets.get(index, ("", 0, 0.0))
                buckets[index] = codec, count + 1, before + sums
        # Ranks of one host may send at the same time or one after the other: the clock tells.
        host_moving[i] = [length(union(each)) for each in of_hosts.values()]
        unknown = unknown or unknown_wait(of_step)
    axes = steps, list(hosts), list(hosts.values())
    return StepTable(*axes, values, waited_for, host_moving, buckets, unknown)


def _bucket_rows(step: Analysed) -> Iterator[tuple[int, str, Array]]:
    """Index, codec and :data:`BUCKET_COLUMNS` of every exchange of all gradients."""
    passes = passes_of(step.record)
    begins = [buckets[0].ready for buckets in passes]
    spans: dict[tuple[int, int, str], list[TimelineSpan]] = defaultdict(list)
    for span in step.spans:
        spans[bisect_right(begins, span.begin), span.bucket, span.phase].append(span)
    for number, buckets in enumerate(passes, start=1):
        last_ready = max(bucket.ready for bucket in buckets)
        for bucket in buckets:
            encode, exchange, decode = (
                spans[number, bucket.index, phase] for phase in ("encode", "exchange", "decode")
            )
            transfer = union(each.transfer for each in exchange)
            sums = (
                bucket.raw,
                bucket.intra + bucket.inter,
                bucket.ready,
                sum(each.end - each.begin for each in encode),
                length(difference(union(each.wait for each in exchange), transfer)),
                length(transfer),
                sum(each.end - each.begin for each in decode),
                max(max((each.end for each in exchange), default=bucket.done) - last_ready, 0),
            )
            yield bucket.index, bucket.codec, np.array(sums, dtype=float)


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
