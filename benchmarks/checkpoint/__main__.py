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
    memory_mb      growth of the memory of all processes, see benchmarks/checkpoint/processes.py

Two ranks save there too. The goals are those that the checkpoints were built for.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoint import tables
from benchmarks.checkpoint.processes import memory_growth, save_in_ranks
from benchmarks.checkpoint.ways import ROWS, Row, Training, nbytes_of
from benchmarks.harness.launch import run_ranks
from benchmarks.harness.results import parser_of, recording
from benchmarks.harness.rows import rotated

_SEED = 1
_STEPS = 40
"""Training steps without a save, before and after those with one."""
_FEWEST = 8
_RANKS_S = 1800.0

Samples = dict[str, list[float]]
"""Of a row, by name in the JSON: a value for every round; NaN where there is no such thing."""

RANKS = "ours blocking, 2 ranks"
_BASES = ("write + fsync", "early write + fsync")
GOALS: tuple[tuple[str, str, str, str | None, float, str], ...] = (
    ("overlap: stall", "ours overlap", "stall_ms", None, 5, "ms"),
    ("overlap: delay of the next step", "ours overlap", "held_ms", None, 5, "ms"),
    ("blocking: stall / memcpy", "ours blocking", "stall_ms", "limit: memcpy", 1.1, "x"),
    *(("sync: total / " + b, "ours sync", "total_ms", "limit: " + b, 1.3, "x") for b in _BASES),
    *(
        (f"blocking: {what} / {b}", "ours blocking", key, "limit: " + b, 1.3, "x")
        for what, key in (("total", "total_ms"), ("write alone", "write_ms"))
        for b in _BASES
    ),
    ("overlap: slow-down of steps", "ours overlap", "slowdown_pct", None, 5, "%"),
    ("overlap: memory", "ours overlap", "memory_mb", None, 64, "MB"),
    ("blocking: slow-down of steps", "ours blocking", "slowdown_pct", None, 5, "%"),
    ("blocking: memory", "ours blocking", "memory_mb", None, 64, "MB"),
    ("2 ranks: stall / memcpy", RANKS, "over_memcpy", None, 0.66, "x"),
    ("2 ranks: stall / stall of one", RANKS, "over_alone", None, 0.6, "x"),
)
"""Name, row, what of it (divided by ``total_ms`` of that row), at most, unit.

Of memory more than the state takes. What is in ms may also be 1 % of a training step.
"""


def main() -> None:
    """Measure, show, and write."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--mb", type=float, default=419, help="size of the state (%(default)s)")
    add("--rounds", type=int, default=5, help="after one that warms up (%(default)s)")
    add("--row", action="append", choices=list(ROWS), help="repeatable (all)")
    add("--dir", type=Path, default=Path(), help="a folder on the disk to write to (here)")
    add("--skip", action="append", choices=("memory", "ranks"), default=[], help="repeatable")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names, size = given.row or list(ROWS), {"mb": given.mb, "seed": _SEED}
    memory: dict[str, float] = {}
    ranks: Samples = {}
    with (
        recording(given, seed=_SEED) as record,
        tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=given.dir) as temporary,
    ):
        folder = Path(temporary).resolve()
        for index, name in enumerate([] if "memory" in given.skip else names):
            if not name.startswith("limit"):
                nbytes = memory_growth(name, folder=folder / f"memory{index}", **size)
                memory[name] = nbytes / 1e6
                print(f"  memory, {name}: {memory[name]:.0f} MB", flush=True)
        if "ranks" not in given.skip:
            (folder / "ranks").mkdir()
            place = {"folder": str(folder / "ranks"), "rounds": given.rounds}
            seconds = run_ranks(save_in_ranks, ranks=2, timeout_s=_RANKS_S, **place, **size)[0]
            ranks = samples_of_ranks(seconds)
        samples, state_mb = measure(folder, names, mb=given.mb, rounds=given.rounds)
        for name in names:
            samples[name]["memory_mb"] = [memory.get(name, math.nan)]
        goals = goals_of(samples | {RANKS: ranks}, state_mb=state_mb)
        record.meta |= {"state_mb": state_mb, "goals": goals}
        known = {name: {**figures(samples[name]), "memory_mb": memory.get(name)} for name in names}
        if ranks:
            known[RANKS] = figures(ranks)
        record.rows = [{"row": row, "rounds": given.rounds, **of} for row, of in known.items()]
        record.show(tables.checkpoint, tables.RANKS)


def measure(
    folder: Path, names: list[str], *, mb: float, rounds: int
) -> tuple[dict[str, Samples], float]:
    """Samples of each row; megabytes of the state. The first round warms up and is left out."""
    training = Training(mb, seed=_SEED)
    small = Training(12.6, seed=_SEED, layers=4)  # steps of some milliseconds
    rows: dict[str, Row] = {}
    samples: dict[str, Samples] = {name: {} for name in names}
    try:
        for index, name in enumerate(names):
            (folder / f"row{index}").mkdir()
            rows[name] = ROWS[name](training)
            rows[name].open(folder / f"row{index}")
        for number in range(rounds + 1):
            for name in rotated(names, number):
                sample = measure_once(rows[name], folder / f"row{names.index(name)}", small)
                if number == 0:
                    continue
                for key, value in sample.items():
                    samples[name].setdefault(key, []).append(value)
                times = f"{sample['stall_ms']:.1f} ms, {sample['total_ms']:.0f} ms in total"
                print(f"  round {number}, {name}: {times}", flush=True)
        return samples, nbytes_of(training.state()) / 1e6
    finally:
        for row in rows.values():
            row.close()


def measure_once(row: Row, folder: Path, small: Training) -> dict[str, float]:
    """One round of one row: a save at rest, one before a training step, one beside small steps."""
    saved = partial(saved_in, folder)
    with saved() as target:
        began = time.perf_counter()
        row.save(target)
        stalled = time.perf_counter()
        row.wait()
        ended = time.perf_counter()
    write_s = row.write_s
    held = step = plain = math.nan
    if row.fenced:
        plain = _step(row)
        with saved() as target:
            before = row.held_s
            row.save(target)
            step = _step(row)
            held = row.held_s - before
            row.wait()
    with saved() as target:
        usual = small.steps(lambda done: done < _STEPS)
        row.save(target)
        meanwhile = small.steps(lambda _: not row.is_done())[:-1]  # the last ran on
        row.wait()
        usual += small.steps(lambda done: done < _STEPS)
    enough = len(meanwhile) >= _FEWEST
    return {
        "stall_ms": 1e3 * (stalled - began),
        "total_ms": 1e3 * (ended - began),
        "write_ms": 1e3 * write_s,
        "held_ms": 1e3 * held,
        "step_ms": 1e3 * step,
        "plain_step_ms": 1e3 * plain,
        "slowdown_pct": 100 * (median(meanwhile) / median(usual) - 1) if enough else math.nan,
    }


def _step(row: Row) -> float:
    began = time.perf_counter()
    row.training.passes()
    row.before_step()
    row.training.step()
    return time.perf_counter() - began


@contextmanager
def saved_in(folder: Path) -> Iterator[Path]:
    """A name to save as, with an idle disk; what was saved is removed at the end."""
    os.sync()
    try:
        yield folder / "saved"
    finally:
        for path in folder.glob("saved*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def samples_of_ranks(rounds: Sequence[dict[str, float]]) -> Samples:
    """Stalls of two ranks that write one checkpoint, and how they compare with one rank's."""
    found: Samples = {
        f"{name}_ms": [1e3 * of_round[name] for of_round in rounds] for name in rounds[0]
    }
    for base in ("memcpy", "alone"):
        found[f"over_{base}"] = [max(of["rank0"], of["rank1"]) / of[base] for of in rounds]
    return found


def figures(samples: Samples) -> dict[str, dict[str, Any] | None]:
    """Medians of all that was measured, the least, and the first and third quartile."""
    found: dict[str, dict[str, Any] | None] = dict.fromkeys(samples)
    for key, values in samples.items():
        if known := [value for value in values if not math.isnan(value)]:
            low, middle, high = np.quantile(known, (0.25, 0.5, 0.75)).tolist()
            found[key] = {"median": middle, "min": min(known), "spread": (low, high)}
    return found


def goals_of(samples: dict[str, Samples], *, state_mb: float) -> list[dict[str, Any]]:
    """Every goal whose rows were measured, and what was reached, in one unit."""
    found = []
    for name, row, key, base, goal, unit in GOALS:
        values = np.array(samples.get(row, {}).get(key, [math.nan]))
        if base is not None:
            values = values / np.array(samples.get(base, {}).get("total_ms", math.nan))
        if np.isnan(values).all():
            continue
        if unit == "ms":
            goal = np.nanmax([goal, 0.01 * median(samples[row]["plain_step_ms"])])
        elif unit == "MB":
            goal += state_mb
        got, goal = float(np.nanmedian(values)), float(goal)
        found.append(
            {"name": name, "measured": got, "goal": goal, "unit": unit, "met": got <= goal}
        )
    return found


if __name__ == "__main__":
    main()
