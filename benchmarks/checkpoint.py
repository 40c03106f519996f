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
    memory_mb      growth of the memory of all processes, see benchmarks/checkpoint_memory.py

Two ranks: benchmarks/checkpoint_ranks.py. The goals are those that the checkpoints were built for.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.checkpoint_memory import memory_growth
from benchmarks.checkpoint_ranks import measure_ranks
from benchmarks.checkpoint_rows import ROWS
from benchmarks.checkpoint_state import nbytes_of
from benchmarks.checkpoint_summary import (
    goals_of,
    show,
    show_ranks,
    summarize,
    summarize_ranks,
)
from benchmarks.checkpoint_timing import Bench, Sample
from benchmarks.report import collect_meta, write_json

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
    show(rows, goals)
    if ranks:
        rows.append(summarize_ranks(ranks))
        show_ranks(rows[-1])
    if arguments.json:
        found = [asdict(goal) | {"met": goal.met} for goal in goals]
        write_json(arguments.json, meta=meta | {"state_mb": state_mb, "goals": found}, rows=rows)


if __name__ == "__main__":
    main()
