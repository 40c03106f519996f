"""Trials with a trainer and a fault that is drawn by chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.crash_disk import small_disk
from benchmarks.crash_kills import kill_both, kill_trainer, kill_writer
from benchmarks.crash_oracle import Verdict
from benchmarks.crash_process import Hang
from benchmarks.crash_stalls import dropped_snapshot, full_disk, slow_disk, stopped_writer
from benchmarks.crash_trainer import Run
from benchmarks.crash_trial import Trial

KINDS: dict[str, Callable[[Trial, random.Random], None]] = {
    "kill the trainer": kill_trainer,
    "kill the writer": kill_writer,
    "kill trainer and writer": kill_both,
    "slow disk (thread)": slow_disk,
    "stopped writer process": stopped_writer,
    "dropped snapshot": dropped_snapshot,
    "full disk": full_disk,
}
_DISK_BYTES = 4 << 20


def any_run(chance: random.Random, folder: Path) -> Run:
    return Run(
        str(folder),
        snapshot=chance.choice(("overlap", "blocking")),
        sharded=chance.random() < 0.4,
        same_name=chance.random() < 0.3,
        last=chance.random() < 0.3,
        max_in_flight=chance.choice((1, 1, 2)),
    )


def run_trial(
    verdict: Verdict, chance: random.Random, place: Path, *, reference: str, foreign: bytes
) -> None:
    """One trial of ``verdict.kind`` in the new folder ``place``."""
    place.mkdir()

    def run_in(folder: Path) -> None:
        run = any_run(chance, folder)
        trial = Trial(verdict, folder, run, reference=reference, foreign=foreign)
        try:
            KINDS[verdict.kind](trial, chance)
        except Hang as hang:
            verdict.require(False, "hang", str(hang))

    if verdict.kind == "full disk":
        with small_disk(place / "disk", nbytes=_DISK_BYTES) as disk:
            run_in(disk / "checkpoints")
    else:
        run_in(place / "checkpoints")
