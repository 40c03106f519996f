"""What a checkpoint costs: stall, time until it is durable, slow-down of training, memory.

    python -m benchmarks.checkpoint [--rounds 5] [--row NAME] [--dir FOLDER] [--json PATH]

The state is that of a perceptron and AdamW: 96 tensors of one size, float32, and small ones. All
ways to save it are rows in one process, one thread for torch, taking turns; each in its own folder
below --dir, which should be on the disk in question. Before each save the disk is idle (sync), and
the file is removed after it, so nothing is overwritten. Rows:

    ours ...       `Checkpointer`, by snapshot mode; writer="process" if nothing is said
    torch.save     to the page cache; and followed by fsync
    Lightning      TorchCheckpointIO, with which ModelCheckpoint saves; never waits for the disk
    dcp            torch.distributed.checkpoint, without options; "reused": with a stager that is
                   kept; "async staging": it copies in the background; "process": writes in one
    limit          a copy to memory that has been used before; write(2) of one buffer and fsync;
                   the same when the kernel is told after every 8 MB to begin

    stall_ms       the call that saves
    total_ms       from that call until the checkpoint is complete, training at rest
    write_ms       what the writer says it took: without the copy
    held_ms        what the next optimizer step waited for the copy, after a forward and backward
    step_ms        that training step; plain_step_ms: the same without a save
    slowdown_pct   steps of some ms while a checkpoint is written, beside steps before and after
    memory_mb      growth of the memory of all processes, see benchmarks/checkpoint/memory.py

Two ranks: benchmarks/checkpoint/ranks.py. The goals are those that the checkpoints were built for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoint.memory import memory_growth
from benchmarks.checkpoint.ranks import measure_ranks
from benchmarks.checkpoint.ways import ROWS, Row, SmallTraining, Training, nbytes_of
from benchmarks.docs_tables import print_tables
from benchmarks.harness.results import collect_meta, write_json
from benchmarks.harness.tables import print_table

_SEED = 1


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a checkpoint costs, beside other ways.")
    add = parser.add_argument
    add("--mb", type=float, default=419, help="size of the state (%(default)s)")
    add("--rounds", type=int, default=5, help="after one that warms up (%(default)s)")
    add("--row", action="append", choices=list(ROWS), help="repeatable (all)")
    add("--dir", type=Path, default=Path(), help="a folder on the disk to write to (here)")
    add("--skip", action="append", choices=("memory", "ranks"), default=[], help="repeatable")
    add("--json", type=Path)
    return parser.parse_args(argv)


def measure(
    folder: Path, names: list[str], *, mb: float, rounds: int
) -> tuple[dict[str, list[Sample]], float]:
    """Samples of each row; megabytes of the state."""
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    bench = Bench(folder, names, mb=mb, seed=_SEED)
    try:
        for index, name, sample in bench.run(rounds):
            samples[name].append(sample)
            print(
                f"  round {index}, {name}: {1e3 * sample.stall_s:.1f} ms, "
                f"{1e3 * sample.total_s:.0f} ms in total",
                flush=True,
            )
        return samples, nbytes_of(bench.training.state()) / 1e6
    finally:
        bench.close()


def main(argv: list[str] | None = None) -> None:
    """Measure, show, and write."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)
    settings = {k: v for k, v in vars(arguments).items() if k not in ("json", "dir")}
    meta = collect_meta(seed=_SEED, arguments=settings)
    names, mb = arguments.row or list(ROWS), arguments.mb
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=arguments.dir) as temporary:
        folder = Path(temporary).resolve()
        growths, ranks = {}, []
        if "memory" not in arguments.skip:
            for index, name in enumerate(names):
                if not name.startswith("limit"):
                    target = folder / f"memory{index}"
                    growths[name] = memory_growth(name, mb=mb, seed=_SEED, folder=target)
                    print(f"  memory, {name}: {growths[name] / 1e6:.0f} MB", flush=True)
        if "ranks" not in arguments.skip:
            ranks = measure_ranks(folder / "ranks", mb=mb, rounds=arguments.rounds, seed=_SEED)
        samples, state_mb = measure(folder, names, mb=mb, rounds=arguments.rounds)
    rows = summarize(samples, growths)
    goals = goals_of(samples, growths, ranks, state_mb=state_mb)
    found = [asdict(goal) | {"met": goal.met} for goal in goals]
    meta |= {"state_mb": state_mb, "goals": found}
    print_tables(meta, rows, "checkpoint")
    if ranks:
        rows.append(summarize_ranks(ranks))
        show_ranks(rows[-1])
    if arguments.json:
        write_json(arguments.json, meta=meta, rows=rows)


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


JsonRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A median, and what there was besides."""

    median: float
    min: float
    spread: tuple[float, float]
    """First and third quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(
            median=statistics.median(values),
            min=min(values),
            spread=(np.quantile(values, 0.25), np.quantile(values, 0.75)),
        )


@dataclass(frozen=True)
class Goal:
    """What was to be reached and what was measured, in one unit."""

    name: str
    measured: float
    goal: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.goal


def summarize(samples: dict[str, list[Sample]], growths: dict[str, int]) -> list[JsonRow]:
    """One row per way to save: figures in ms, percent and MB; None where there is no such thing."""
    rows = []
    for name, of_row in samples.items():
        row: JsonRow = {"row": name, "rounds": len(of_row)}
        for field in fields(Sample):
            values = [value for s in of_row if (value := getattr(s, field.name)) is not None]
            is_time = field.name.endswith("_s")
            key = f"{field.name}ms".replace("_sms", "_ms") if is_time else f"{field.name}_pct"
            scale = 1e3 if is_time else 1e2
            scaled = [scale * value for value in values]
            row[key] = asdict(Figure.of(scaled)) if scaled else None
        row["memory_mb"] = growths[name] / 1e6 if name in growths else None
        rows.append(row)
    return rows


def summarize_ranks(rounds: list[dict[str, float]]) -> JsonRow:
    """Stalls of two ranks that write one checkpoint; ratios are medians over rounds."""
    row: JsonRow = {"row": "ours blocking, 2 ranks", "rounds": len(rounds)}
    for name in rounds[0]:
        row[f"{name}_ms"] = asdict(Figure.of([1e3 * of_round[name] for of_round in rounds]))
    for base in ("memcpy", "alone"):
        slower = [max(r["rank0"], r["rank1"]) / r[base] for r in rounds]
        row[f"over_{base}"] = asdict(Figure.of(slower))
    return row


def goals_of(
    samples: dict[str, list[Sample]],
    growths: dict[str, int],
    ranks: list[dict[str, float]],
    *,
    state_mb: float,
) -> list[Goal]:
    """Every goal whose rows were measured."""

    def median(name: str, field: str) -> float | None:
        values = [getattr(sample, field) for sample in samples.get(name, ())]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def ratio(name: str, field: str, base: str) -> float | None:
        pairs = zip(samples.get(name, ()), samples.get(base, ()), strict=False)
        values = [getattr(one, field) / other.total_s for one, other in pairs]
        return statistics.median(values) if values else None

    goals = []

    def add(name: str, measured: float | None, goal: float, unit: str, scale: float = 1) -> None:
        if measured is not None:
            goals.append(Goal(name, scale * measured, goal, unit))

    overlap, blocking, sync = "ours overlap", "ours blocking", "ours sync"
    step = median(overlap, "plain_step_s")
    limit = max(5.0, 10 * step) if step else 5.0  # 1 % of a step, in ms
    add("overlap: stall", median(overlap, "stall_s"), limit, "ms", 1e3)
    add("overlap: held back in the next step", median(overlap, "held_s"), limit, "ms", 1e3)
    add("blocking: stall / memcpy", ratio(blocking, "stall_s", "limit: memcpy"), 1.1, "x")
    for name, field in ((sync, "total_s"), (blocking, "total_s"), (blocking, "write_s")):
        for base in ("limit: write + fsync", "limit: early write + fsync"):
            what = "total" if field == "total_s" else "write alone"
            title = f"{name.removeprefix('ours ')}: {what} / {base.removeprefix('limit: ')}"
            add(title, ratio(name, field, base), 1.3, "x")
    for name in (overlap, blocking):
        title = f"{name.removeprefix('ours ')}: slow-down of steps"
        add(title, median(name, "slowdown"), 5, "%", 100)
        growth = growths.get(name)
        add(f"{name.removeprefix('ours ')}: memory", growth, state_mb + 64, "MB", 1e-6)
    if ranks:
        row = summarize_ranks(ranks)
        for base in ("memcpy", "alone"):
            title = f"2 ranks: stall / {'memcpy' if base == 'memcpy' else 'stall of one'}"
            add(title, row[f"over_{base}"]["median"], 0.66 if base == "memcpy" else 0.6, "x")
    return goals


def show_ranks(row: JsonRow) -> None:
    """The row of two ranks, one figure a line."""
    figures = {name: value for name, value in row.items() if isinstance(value, dict)}
    cells = [
        [name, f"{figure['median']:.2f} ({figure['min']:.2f})"] for name, figure in figures.items()
    ]
    print_table(row["row"], columns=["", "median (least)"], rows=cells)


if __name__ == "__main__":
    main()
