"""Steps of one rank that stay in its file: minutes of a run are gigabytes of spans."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

from typing_extensions import override

from lightning_dist.profiling.capture.lines import from_line
from lightning_dist.profiling.capture.records import StepRecord

_COLUMNS = 6


class StepLines(Mapping[int, StepRecord]):
    """Steps by number. One is read from its line when it is asked for.

    Raises:
        OSError: when a step is asked for, and the file is gone.
        ValueError: the same, and the file is another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[int, int] = {}
        self._heads = array("q")  # 48 bytes a step; records of it would take twenty times as much
        self._newest: StepRecord | None = None

    def add(self, step: StepRecord, *, at: int, length: int) -> None:
        """Of ``step`` only the head is kept; its line has ``length`` bytes, ``at`` so many.

        Raises:
            ValueError: a time that no clock has.
        """
        times = step.begin, step.duration, step.overhead
        try:
            head = array("q", (*times, step.detailed, at, length))
        except OverflowError:
            raise ValueError(f"times of a step are nanoseconds, got {times!r:.80}") from None
        self._rows[step.step] = len(self._heads) // _COLUMNS
        self._heads.extend(head)

    def head(self, step: int) -> StepRecord:
        """It, without phases, buckets and spans; nothing is read for that."""
        begin, duration, overhead, detailed, _, _ = self._row(step)
        return StepRecord(step, begin, duration, detailed=bool(detailed), overhead=overhead)

    @override
    def __getitem__(self, step: int) -> StepRecord:
        *_, at, length = self._row(step)
        if self._newest is None or self._newest.step != step:  # it is asked for several times
            with self._path.open("rb") as file:
                file.seek(at)
                line = file.read(length)
            record = from_line(line.decode(errors="replace"))
            if not isinstance(record, StepRecord) or record.step != step:
                raise ValueError(f"{self._path} has changed while it was read; read it again")
            self._newest = record
        return self._newest

    def _row(self, step: int) -> array[int]:
        row = self._rows[step] * _COLUMNS
        return self._heads[row : row + _COLUMNS]

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __contains__(self, step: object) -> bool:
        return step in self._rows
