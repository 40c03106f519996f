"""Time of saves: all rows in one process, round-robin."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint_row import Row
from benchmarks.checkpoint_rows import ROWS
from benchmarks.checkpoint_state import SmallTraining, Training

_STEPS = 40
"""Training steps without a save, before and after those with one."""
_FEWEST = 8


@dataclass(kw_only=True)
class Sample:
    """One round of one row; seconds."""

    stall_s: float  # the call
    total_s: float  # until the checkpoint is complete, nothing else running
    write_s: float | None  # the part of the writer, by its own account
    held_s: float | None  # the next optimizer step, held back by the copy
    step_s: float | None  # that training step, with its passes and what held it back
    plain_step_s: float | None  # the same without a save
    slowdown: float | None  # of training steps while it was written; None: nothing in flight


class Bench:
    """One training, and every row with a folder of its own."""

    def __init__(self, folder: Path, names: list[str], *, mb: float, seed: int) -> None:
        self.training = Training(mb, seed=seed)
        self._small = SmallTraining(seed=seed)
        self._rows: dict[str, Row] = {}
        self._folders: dict[str, Path] = {}
        for index, name in enumerate(names):
            self._folders[name] = folder / f"row{index}"
            self._folders[name].mkdir()
            self._rows[name] = ROWS[name](self.training)
            self._rows[name].open(self._folders[name])

    def run(self, rounds: int) -> Iterator[tuple[int, str, Sample]]:
        """Samples, as (round, row, sample); the first round warms up and is left out."""
        names = list(self._rows)
        for index in range(rounds + 1):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                sample = self._measure(name)
                if index:
                    yield index, name, sample

    def close(self) -> None:
        for row in self._rows.values():
            row.close()

    def _measure(self, name: str) -> Sample:
        row = self._rows[name]
        with self._target(name) as target:
            began = time.perf_counter()
            row.save(target)
            stalled = time.perf_counter()
            row.wait()
            ended = time.perf_counter()
        held = step = plain = None
        if row.fenced:
            plain = self._step(row)
            with self._target(name) as target:
                before = row.held_back_s()
                row.save(target)
                step = self._step(row)
                held = row.held_back_s() - before
                row.wait()
        return Sample(
            stall_s=stalled - began,
            total_s=ended - began,
            write_s=row.write_s,
            held_s=held,
            step_s=step,
            plain_step_s=plain,
            slowdown=self._slowdown(row, name),
        )

    def _step(self, row: Row) -> float:
        began = time.perf_counter()
        self.training.passes()
        row.before_step()
        self.training.step()
        return time.perf_counter() - began

    def _slowdown(self, row: Row, name: str) -> float | None:
        with self._target(name) as target:
            usual = self._small.steps(lambda done: done < _STEPS)
            row.save(target)
            meanwhile = self._small.steps(lambda _: not row.is_done())[:-1]  # the last ran on
            row.wait()
            usual += self._small.steps(lambda done: done < _STEPS)
        if len(meanwhile) < _FEWEST:
            return None
        return statistics.median(meanwhile) / statistics.median(usual) - 1

    @contextmanager
    def _target(self, name: str) -> Iterator[Path]:
        """A name to save as, with an idle disk; what was saved is removed at the end."""
        os.sync()
        folder = self._folders[name]
        try:
            yield folder / "saved"
        finally:
            for path in folder.glob("saved*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
