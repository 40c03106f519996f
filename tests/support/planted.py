"""Runs whose times are planted: what a profile of them has to say is known."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lightning_dist.profiling.analysis.breakdown import Analysed
from lightning_dist.profiling.analysis.parts import PARTS
from lightning_dist.profiling.capture.events import (
    BucketTimes,
    ClockRecord,
    EndRecord,
    Phase,
    RankRecord,
    Record,
    Span,
    StepRecord,
)
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.run import RankRun, Run

MS = 1_000_000
T = TypeVar("T")


def replace(thing: T, **changes: Any) -> T:
    """A copy of a record, or of any dataclass, with other values."""
    copy: Any = msgspec.structs.replace if isinstance(thing, msgspec.Struct) else replace_dataclass
    return copy(thing, **changes)


@dataclass(frozen=True)
class Planted:
    """A run in which every bucket is encoded, exchanged in one collective, and decoded at the end.

    Times are milliseconds. A rank has one worker: buckets are encoded one after the other; the
    link carries one collective at a time, which moves when all members have come to it.

    Args:
        late: extra forward time by rank.
        late_data: extra time before the forward pass by rank.
        meets_in_forward: ranks wait for each other at the begin of it, as for DDP's buffers.
        shift: by how much a rank's clock is ahead of rank 0's.
        slow_steps: factor on ``transfer`` by step.
        misread: by how much a rank's clock was read too far ahead.
        uncertainty: of these readings, at the begin and the end; None: there are none.
    """

    world_size: int = 2
    nodes: Sequence[str] = ("node-a", "node-b")
    steps: int = 6
    data: float = 2
    forward: float = 20
    backward: float = 40
    buckets: int = 4
    encode: float = 1
    transfer: float = 15
    decode: float = 2
    optimizer: float = 5
    late: Mapping[int, float] = field(default_factory=dict)
    late_data: Mapping[int, float] = field(default_factory=dict)
    meets_in_forward: bool = False
    shift: Mapping[int, float] = field(default_factory=dict)
    slow_steps: Mapping[int, float] = field(default_factory=dict)
    misread: Mapping[int, float] = field(default_factory=dict)
    uncertainty: float | None = 0.02
    codec: str = "int8"
    raw: int = 4_000_000
    sent: int = 1_000_000
    device: str = "cpu"

    def run(self) -> Run:
        """As if read from its folder."""
        records: dict[int, list[StepRecord]] = {rank: [] for rank in range(self.world_size)}
        begins = dict.fromkeys(records, 0.0)
        for step in range(self.steps):
            begins = self._step(step, begins, records)
        return Run({rank: self._rank(rank, steps) for rank, steps in records.items()})

    def _rank(self, rank: int, steps: Sequence[StepRecord]) -> RankRun:
        shift = round(self.shift.get(rank, 0) * MS)
        read = shift + round(self.misread.get(rank, 0) * MS)
        error = round((self.uncertainty or 0) * MS)
        last = max((step.begin + step.duration for step in steps), default=shift + 1)
        readings = [ClockRecord(at, offset=-read, uncertainty=error) for at in (shift, last)]
        return RankRun(
            RankRecord(
                rank=rank,
                world_size=self.world_size,
                node=self.nodes[rank % len(self.nodes)],
                groups={"flat": list(range(self.world_size))},
                clock=shift,
                unix=1.8e9,
                codec=self.codec,
                backend="gloo",
                device=self.device,
                versions={"torch": "2.13.0"},
            ),
            {each.step: each for each in steps},
            clocks=readings if rank and self.uncertainty is not None else [],
            end=EndRecord("finished"),
        )

    def _step(
        self, step: int, begins: Mapping[int, float], records: dict[int, list[StepRecord]]
    ) -> dict[int, float]:
        ranks = range(self.world_size)
        forward = {rank: self.forward + self.late.get(rank, 0) for rank in ranks}
        loaded = {rank: begins[rank] + self.data + self.late_data.get(rank, 0) for rank in ranks}
        met = max(loaded.values()) if self.meets_in_forward else 0.0
        backward = {rank: max(loaded[rank], met) + forward[rank] for rank in ranks}
        free = dict(backward)  # when the worker of a rank has nothing to do
        ready: dict[int, list[float]] = {rank: [] for rank in ranks}
        arrived: dict[int, list[float]] = {rank: [] for rank in ranks}
        ended: list[float] = []
        for index in range(self.buckets):
            for rank in ranks:
                ready[rank].append(backward[rank] + self.backward * (index + 1) / self.buckets)
                free[rank] = max(free[rank], ready[rank][-1]) + self.encode
                arrived[rank].append(free[rank])
            last = max(arrived[rank][-1] for rank in ranks)
            before = ended[-1] if ended else 0.0
            ended.append(max(last, before) + self.transfer * self.slow_steps.get(step, 1))
        ends = {}
        for rank in ranks:
            spans = []
            for index in range(self.buckets):
                begin = arrived[rank][index]
                if self.encode:
                    spans.append(
                        self._span(rank, begins, "encode", index, begin - self.encode, begin)
                    )
                spans.append(self._span(rank, begins, "exchange", index, begin, ended[index]))
            now = free[rank]
            done = []
            for index in range(self.buckets):
                now = max(now, ended[index])
                if self.decode:
                    spans.append(self._span(rank, begins, "decode", index, now, now + self.decode))
                now += self.decode
                done.append(now)
            ends[rank] = now + self.optimizer
            records[rank].append(
                self._record(
                    step, rank, begins[rank], loaded[rank], backward[rank], now, ready[rank], spans
                )
            )
        return ends

    def _span(
        self,
        rank: int,
        begins: Mapping[int, float],
        phase: str,
        bucket: int,
        begin: float,
        end: float,
    ) -> Span:
        times = round((begin - begins[rank]) * MS), round((end - begins[rank]) * MS)
        if phase != "exchange":
            return Span(phase, bucket, *times)
        return Span(phase, bucket, *times, "all_gather", "flat", self.sent, order=bucket)

    def _record(
        self,
        step: int,
        rank: int,
        begin: float,
        loaded: float,
        backward: float,
        done: float,
        ready: Sequence[float],
        spans: Sequence[Span],
    ) -> StepRecord:
        def since(time: float) -> int:
            return round((time - begin) * MS)

        inter = len(set(self.nodes[: self.world_size])) > 1
        return StepRecord(
            step,
            begin=round((begin + self.shift.get(rank, 0)) * MS),
            duration=since(done + self.optimizer),
            phases=(
                Phase("between_steps", 0, since(loaded)),
                Phase("forward", since(loaded), since(backward)),
                Phase("backward", since(backward), since(done)),
                Phase("optimizer", since(done), since(done + self.optimizer)),
            ),
            buckets=tuple(
                BucketTimes(
                    index,
                    since(time),
                    since(done),
                    self.raw,
                    0 if inter else self.sent,
                    self.sent if inter else 0,
                    self.codec,
                )
                for index, time in enumerate(ready)
            ),
            spans=tuple(sorted(spans, key=lambda span: span.begin)),
            overhead=50_000,
        )


def replaced(run: Run, rank: int, **changes: object) -> Run:
    """``run``, where one rank has recorded something else."""
    return Run({**run.ranks, rank: replace(run.ranks[rank], **changes)}, run.notes)


def doubled(record: StepRecord) -> StepRecord:
    """A step with all that it exchanges once more behind it, as a closure that is called twice."""
    again = record.duration
    orders = sum(span.phase == "exchange" for span in record.spans)
    return replace(
        record,
        duration=2 * again,
        phases=[
            *record.phases,
            *(
                replace(each, begin=each.begin + again, end=each.end + again)
                for each in record.phases
            ),
        ],
        buckets=[
            *record.buckets,
            *(
                replace(each, ready=each.ready + again, done=each.done + again)
                for each in record.buckets
            ),
        ],
        spans=[
            *record.spans,
            *(
                replace(
                    each,
                    begin=each.begin + again,
                    end=each.end + again,
                    order=each.order + orders if each.phase == "exchange" else -1,
                )
                for each in record.spans
            ),
        ],
    )


def twice(run: Run) -> Run:
    for rank in run.ranks:
        steps = run.ranks[rank].steps
        apart = [
            replace(doubled(each), begin=each.begin + number * each.duration)
            for number, each in enumerate(steps.values())
        ]
        run = replaced(run, rank, steps={each.step: each for each in apart})
    return run


def bare(run: Run, only: Collection[int] = range(99), **changes: object) -> Run:
    """``run``, in which the records of steps, or of ``only`` some, say something else."""
    for rank, of_rank in run.ranks.items():
        steps = {
            step: replace(each, **changes) if step in only else each
            for step, each in of_rank.steps.items()
        }
        run = replaced(run, rank, steps=steps)
    return run


def changed(run: Run, change: Callable[[StepRecord], StepRecord], *ranks: int) -> Run:
    """``run``, where every step of ``ranks``, or of all, is what ``change`` makes of it."""
    for rank in ranks or run.ranks:
        steps = {step: change(each) for step, each in run.ranks[rank].steps.items()}
        run = replaced(run, rank, steps=steps)
    return run


def coarse(run: Run, rank: int, *steps: int) -> Run:
    """``run``, where a rank has not recorded ``steps``, or any, in detail."""
    only_timed = bare(run, steps or range(99), buckets=(), spans=(), detailed=False)
    return replaced(run, rank, steps=only_timed.ranks[rank].steps)


def records_of(rank: RankRun) -> list[Record]:
    end = [] if rank.end is None else [rank.end]
    return [rank.metadata, *rank.clocks, *rank.steps.values(), *rank.errors, *rank.links, *end]


def write(folder: Path, ranks: Iterable[RankRun]) -> None:
    """A file for each of ``ranks``."""
    for each in ranks:
        file = RankFile(folder, rank=each.metadata.rank)
        file.write(records_of(each))
        file.close()


def phases_of(step: Any, *, unit: int = 1) -> str:
    """Such as ``forward 2-22, backward 22-42``."""
    return ", ".join(f"{p.name} {p.begin // unit}-{p.end // unit}" for p in step.phases)


def check_identities(parts: Analysed) -> None:
    assert tuple(parts.parts) == PARTS
    assert sum(parts.parts.values()) == parts.duration
    assert min(parts.parts.values()) >= 0
    ns = parts.ns
    assert ns["hidden"] + ns["exposed_wait"] + ns["exposed_transfer"] == ns["exchange"]
