"""Steps of a run that count, and their times and bytes as arrays."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, passes_of, unknown_wait
from lightning_dist.profiling.analysis.metrics import count
from lightning_dist.profiling.analysis.parts import (
    PARTS,
    BucketSummary,
    Interval,
    TimelineSpan,
    difference,
    length,
    union,
)
from lightning_dist.profiling.run import RankRun, Run

MS = 1e6
"""Nanoseconds in a millisecond; bytes in a megabyte, as links count them."""

MOST = 500
"""Steps that are looked at span by span: minutes become seconds, and means stay means."""
_LEAST_MISSING = 0.05
"""Share of the steps up to which the end of a rank changes nothing: a killed one loses a second."""
_FEWEST = 50
_SPANS = 500_000

COLUMNS = (
    *PARTS,
    "duration",
    "exposed",
    "exposed_fsdp",  # of it, in collectives that FSDP calls itself
    "exchange",  # any was in flight
    "hidden",
    "waited",  # for other ranks, hidden or not
    "late",  # for how long the others, added up, waited for this rank
    "moving",  # any exchange moved, on this rank or to another
    "intra_moving",  # one moved that had another member on this node
    "inter_moving",  # one moved that had a member on another node
    "raw",
    "intra",
    "inter",
    "exchanges",  # their number
    "encode",
    "decode",
    "after",  # from the last mean to the end of the step
    "moved",  # transfers of all exchanges, added up
    "uncertainty",  # of the clock
    "passes",  # backward passes that exchanged gradients
    "optimizer_steps",  # 1: an optimizer has made one
)
BUCKET_COLUMNS = tuple(field.name for field in fields(BucketSummary))[2:]

_PART_OF = {"encode_ms": "exposed_codec", "wait_ms": "exposed_wait", "decode_ms": "exposed_codec"}
"""The part of a step whose reason for being unknown is also that of a bucket's column."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTable:
    """Nanoseconds, bytes and counts of a run: whole numbers, as floats, which sum them exactly.

    Args:
        values: by step, rank and :data:`COLUMNS`; NaN: the step was not recorded in detail.
        waited_for: by rank that waited and rank that was late, all steps added up.
        node_moving: by step and node, in the order of ``dict.fromkeys(nodes)``, while any rank of
            it exchanged with other nodes.
        buckets: by index: the codec; how often it was exchanged; sums of :data:`BUCKET_COLUMNS`, in
            nanoseconds and bytes.
        unknown_wait: reason why waiting is not, or not wholly, known; empty: it is.
    """

    steps: Sequence[int]
    ranks: Sequence[int]
    nodes: Sequence[str]
    values: Array
    waited_for: Array
    node_moving: Array
    buckets: Mapping[int, tuple[str, int, Array]]
    unknown_wait: str = ""

    def of(self, *columns: str) -> Array:
        """A column by step and rank, or the sum of several."""
        column: Array = self.values[:, :, [COLUMNS.index(name) for name in columns]].sum(axis=2)
        return column

    def total(self, *columns: str) -> float:
        """Sum of columns over steps and ranks."""
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

        By step and link: that of a node to others, or where nothing goes there, of a rank.
        """
        inter = self.of("inter")
        if not inter.any():
            return self.of("intra"), self.of("intra_moving")
        nodes = np.array(self.nodes)
        links = [inter[:, nodes == node].sum(axis=1) for node in dict.fromkeys(self.nodes)]
        return np.stack(links, axis=1), self.node_moving

    def bucket_summaries(self, unknown: Container[str]) -> list[BucketSummary]:
        """Means of every bucket; a zero of what is ``unknown`` was not measured."""
        summaries = []
        for index, (codec, times, sums) in sorted(self.buckets.items()):
            means = dict(zip(BUCKET_COLUMNS, (sums / times / MS).tolist(), strict=True))
            for name, part in _PART_OF.items():
                if not means[name] and part in unknown:
                    means[name] = None
            summaries.append(BucketSummary(index, codec, **means))
        return summaries


def step_table(
    run: Run, steps: Sequence[int], analysed: Iterable[Sequence[Analysed]] | None = None
) -> StepTable:
    """The table of these steps; ``analysed``: every step as ``analyse`` has it, if it is there."""
    nodes = {rank: rank_run.metadata.node for rank, rank_run in run.ranks.items() if rank_run.steps}
    rows = {rank: row for row, rank in enumerate(nodes)}
    values = np.full((len(steps), len(rows), len(COLUMNS)), np.nan)
    waited_for = np.zeros((len(rows), len(rows)))
    node_moving = np.zeros((len(steps), len(set(nodes.values()))))
    buckets: dict[int, tuple[str, int, Array]] = {}
    unknown = ""
    for i, of_step in enumerate(analysed or (analyse(run, step) for step in steps)):
        of_nodes: dict[str, list[Interval]] = {node: [] for node in nodes.values()}
        late: Counter[int] = Counter()
        for of_rank in of_step:
            late.update(of_rank.waited_for)
        for of_rank in of_step:
            row, begin = rows[of_rank.rank], of_rank.begin
            figures = {**of_rank.ns, "late": late[of_rank.rank]}
            values[i, row] = [figures[name] for name in COLUMNS]
            for last, waited in of_rank.waited_for.items():
                waited_for[row, rows[last]] += waited
            moving = [(begin + a, begin + b) for a, b in of_rank.inter_moving]
            of_nodes[nodes[of_rank.rank]] += moving
            for index, codec, sums in _bucket_rows(of_rank):
                _, times, before = buckets.get(index, ("", 0, 0.0))
                buckets[index] = codec, times + 1, before + sums
        # Ranks of one node may send at the same time or one after the other: the clock tells.
        node_moving[i] = [length(union(intervals)) for intervals in of_nodes.values()]
        unknown = unknown or unknown_wait(of_step)
    axes = steps, list(nodes), list(nodes.values())
    return StepTable(*axes, values, waited_for, node_moving, buckets, unknown)


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
            transfer = union(span.transfer for span in exchange)
            sums = (
                bucket.raw,
                bucket.intra + bucket.inter,
                bucket.ready,
                sum(span.end - span.begin for span in encode),
                length(difference(union(span.wait for span in exchange), transfer)),
                length(transfer),
                sum(span.end - span.begin for span in decode),
                max(max((span.end for span in exchange), default=bucket.done) - last_ready, 0),
            )
            yield bucket.index, bucket.codec, np.array(sums, dtype=float)


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class Sample:
    """Steps of a run that count, in order.

    Args:
        ranks: that have recorded any step.
        steps: that all of these have recorded, without the first ``warmup_steps``.
        detailed: those of them to look at span by span; ``reason``: why there are none.
        notes: what was left out, for the user to see.
        cut: such as ``"9 of 40 steps"``, where a rank ends much earlier than another.
    """

    ranks: Mapping[int, RankRun]
    steps: Sequence[int]
    detailed: Sequence[int]
    warmup_steps: int
    reason: str
    notes: Sequence[str]
    cut: str = ""

    def durations(self, step: int) -> list[int]:
        """Duration of a step on every rank, nanoseconds."""
        return [rank_run.head(step).duration for rank_run in self.ranks.values()]

    def durations_ms(self) -> list[float]:
        """Duration of every step, the mean over ranks."""
        return [mean(self.durations(step)) / MS for step in self.steps]


def sample(run: Run, *, warmup_steps: int) -> Sample:
    """The steps that count, and those of them to look at in detail.

    Raises:
        ValueError: ``warmup_steps`` is negative.
    """
    if warmup_steps < 0:
        raise ValueError(
            f"warmup_steps must not be negative, got {warmup_steps}; 0 counts all steps"
        )
    ranks = {rank: rank_run for rank, rank_run in run.ranks.items() if rank_run.steps}
    common = Run(ranks).common_steps
    recorded = set[int]().union(*(rank_run.steps for rank_run in ranks.values()))
    left_out = warmup_steps if len(common) > warmup_steps else 0
    steps = common[left_out:]
    rank_runs = ranks.values()
    detailed = [s for s in steps if all(rank_run.head(s).detailed for rank_run in rank_runs)]
    spans = sum(len(rank_run.steps[s].spans) for rank_run in rank_runs for s in detailed[-1:])
    most = min(MOST, max(_FEWEST, _SPANS // max(spans, 1)))
    of_all = f"{len(common)} of {len(recorded)} steps"
    end = min((max(rank_run.steps) for rank_run in ranks.values()), default=0)
    lost = sum(step > end for step in recorded) if common else 0
    notes = (
        (len(common) < len(recorded), f"{of_all} are of all ranks; only these count"),
        (
            len(common) > 0 and left_out < warmup_steps,
            f"with only {count(len(common), 'step')} the first are not left out, in which DDP "
            "still builds its buckets",
        ),
        (
            0 < len(detailed) < len(steps),
            f"parts and communication are of the {count(len(detailed), 'step')} of {len(steps)} "
            "that were recorded in detail; step times are of all",
        ),
        (
            len(detailed) > most,
            f"communication is of {most} of {len(detailed)} steps, spread evenly; step times are "
            "of all",
        ),
    )
    reason = "no step was recorded on any rank"
    if recorded:
        of_what = "in detail on all ranks" if steps else "on all ranks"
        reason = "" if detailed else f"no step was recorded {of_what}"
    return Sample(
        ranks,
        steps,
        _spread(detailed, most),
        left_out,
        reason=reason,
        notes=[note for holds, note in notes if holds],
        cut=of_all if lost > _LEAST_MISSING * len(recorded) else "",
    )


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """One of every stretch, at random: whatever happens every n-th step has its share."""
    if len(steps) <= most:
        return list(steps)
    rng = random.Random(0)
    edges = [math.floor(len(steps) * i / most) for i in range(most + 1)]
    return [steps[rng.randrange(edges[i], edges[i + 1])] for i in range(most)]
