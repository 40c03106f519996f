"""How long the files of a profile take to be made, and how large they are."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import (
    BucketTimes,
    ClockRecord,
    EndRecord,
    Phase,
    RankRecord,
    Span,
    StepRecord,
)
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.report.files import write_files
from lightning_dist.profiling.run import read_run

MS = 1_000_000
_BUCKETS = 8
_RANKS_PER_HOST = 2


def outputs(folder: Path, *, ranks: int, steps: int, seed: int) -> dict[str, Any]:
    """Seconds and megabytes of everything, of a run with 8 buckets in which all steps are told."""
    write_run(folder, ranks=ranks, steps=steps, seed=seed)
    row: dict[str, Any] = {"kind": "outputs", "ranks": ranks, "steps": steps}
    row["lines_mb"] = _megabytes(folder, "rank*.jsonl")
    begin = time.perf_counter()
    run = read_run(folder)
    row["read_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    summary = summarize(run)
    row["summarize_s"] = time.perf_counter() - begin
    for name, wanted, pattern in (
        ("html", {"html": True}, "report.html"),
        ("trace", {"html": False, "trace": True}, "trace.json.gz"),
        ("csv", {"html": False, "csv": True}, "*.csv"),
    ):
        begin = time.perf_counter()
        written = write_files(folder, run, summary, **wanted)
        row[f"{name}_s"] = time.perf_counter() - begin
        assert not written.problems, written.problems
        row[f"{name}_mb"] = _megabytes(folder, pattern)
    row["summary_mb"] = _megabytes(folder, "summary.json")
    return row


def write_run(folder: Path, *, ranks: int, steps: int, seed: int) -> None:
    """Lines of a run that never was, with times that vary as those of runs do."""
    hosts = [f"host{rank // _RANKS_PER_HOST}" for rank in range(ranks)]
    for rank in range(ranks):
        about = RankRecord(
            rank, ranks, hosts[rank], {"flat": list(range(ranks))}, 0, 1.8e9, "int8", "gloo", "cpu"
        )
        rng = random.Random(seed + rank)
        file = RankFile(folder, rank=rank)
        file.write([about, ClockRecord(0, 0, 20_000)])
        file.write([_step(step, rng) for step in range(steps)])
        file.write([EndRecord("finished")])
        file.close()


def _step(step: int, rng: random.Random) -> StepRecord:
    """Forward to 20 ms, backward to 60, the last bucket there at 90 of 100."""
    late = rng.randrange(5 * MS)
    buckets, spans = [], []
    for index in range(_BUCKETS):
        ready = 20 * MS + late + (index + 1) * 5 * MS
        launch = ready + MS + rng.randrange(MS // 10)
        end = launch + 20 * MS
        spans.append(Span("encode", index, ready, launch))
        spans.append(
            Span("exchange", index, launch, end, "all_gather", "flat", 1_000_000, order=index)
        )
        spans.append(Span("decode", index, end, end + MS))
        buckets.append(BucketTimes(index, ready, end + MS, 4_000_000, 0, 1_000_000, "int8"))
    edges = (0, 2 * MS, 20 * MS + late, 90 * MS, 100 * MS)
    names = ("between_steps", "forward", "backward", "optimizer")
    return StepRecord(
        step,
        step * 100 * MS,
        100 * MS,
        tuple(Phase(*each) for each in zip(names, edges, edges[1:], strict=False)),
        tuple(buckets),
        tuple(sorted(spans, key=lambda span: span.begin)),
        overhead=50_000,
    )


def _megabytes(folder: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in folder.glob(pattern)) / 1e6
