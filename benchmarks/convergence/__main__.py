"""Do models trained with compressed gradients end where fp32 DDP's end?

    python benchmarks/convergence [--quick] [--codec NAME ...] [--task gpt] [--json PATH]

Two small trainings over real gloo groups between processes on this machine, one thread each, whose
ranks see differently distributed data: averaging gradients that agree anyway would hide what a
codec loses.

    gpt      the demo's byte-level GPT with 0.12 M parameters, 160 steps of AdamW with clipping.
             Ranks train on different packages of Python's standard library. val_loss: nats per byte
             on 256 fixed windows from files that no rank trains on
    digits   an MLP with 0.03 M parameters on scikit-learn's digits, 300 steps of SGD with momentum.
             80 % of a rank's images are of its own labels only. test_accuracy (percent) and
             test_loss on 449 images

The batch is divided among the ranks. Rows:

    ddp         DistributedDataParallel as it is, fp32: the reference
    NAME        `compress_ddp(ddp, NAME)` with the codec's default error feedback
    NAME-noef   without error feedback, where the default has it (2 ranks only)
    NAME-warm   the first fifth of the steps uncompressed (`start_step`), for the codecs that keep
                little of a gradient
    onebit-adam:NAME
                `OneBitAdam` in place of AdamW (gpt), its variance frozen after a fifth of the steps
                and momenta through codec NAME; with `none` what the frozen variance alone does.
                Not clipped, unlike AdamW

All rows of a task start a seed with the same weights and see the same batches with the same
learning rates, which nobody has tuned for any row; so differences to ddp are paired by seed. A
codec that brings momentum of its own (dgc) runs with SGD without momentum, and not in gpt: beside
AdamW it is refused.
`min_compress_numel` is lowered to 256 (or to the codec's own, if that is lower): with the defaults
some of these small matrices would travel uncompressed, and the codecs would look better than they
are.

What is reported, for each row, task and number of ranks:

    metrics              the values of all seeds after the last step, their mean and standard
                         deviation
    diff_pct_of_ddp      the mean, and the standard deviation, of (row - ddp) / ddp x 100 over seeds
    within_ddp_spread    whether |mean(row - ddp)| <= the standard deviation of ddp over seeds. A
                         large spread makes that easy: read it with the difference
    bytes_ratio          fp32 DDP's bytes divided by those sent, by rank 0's own counter
    replicas_identical   whether after every run all ranks held the same parameters, bit by bit
    seconds_per_run      set-up and evaluation included; ranks share cores, so no measure of speed
    reason               why a row did not run (its settings were refused) or what broke it

The JSON is written after every row, so that an interrupted run keeps what it finished.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.convergence.ranks import WorldFailed, run_jobs
from benchmarks.convergence.tasks import DDP_ROW, Job, Refused, Run
from benchmarks.docs_tables import print_tables
from benchmarks.harness.results import collect_meta, write_json
from lightning_dist.codecs import CODECS, resolve_codec

TASKS = ("gpt", "digits")
WARM_CODECS = ("sign", "topk", "powersgd")
ONEBIT_CODECS = ("none", "sign")
QUICK_CODECS = ("bf16", "int8", "int4")


def jobs_of(task: str, codecs: list[str], *, ranks: int, steps: int | None) -> list[Job]:
    """DDP first, then every codec as it is, and the rows that show what its setting does."""
    make = partial(Job, task=task, steps=steps)
    jobs = [make(codec=None)]
    for name in codecs:
        jobs.append(make(codec=name))
        try:
            codec = resolve_codec(name)
        except ValueError:
            continue  # the row itself will say why
        if codec.momentum_correction and task == "gpt":
            jobs.pop()
            continue
        if codec.name in WARM_CODECS:
            jobs.append(make(codec=name, warm=True))
        has_feedback = codec.keeps_residual and not codec.lossless
        if has_feedback and not codec.momentum_correction and ranks == 2:
            jobs.append(make(codec=name, error_feedback=False))
        if task == "gpt" and codec.name in ONEBIT_CODECS:
            jobs.append(make(codec=name, onebit=True))
    return jobs


def measure(arguments: argparse.Namespace, meta: dict[str, Any]) -> list[Cell]:
    """All worlds one after the other; the JSON grows with every finished row."""
    cells: list[Cell] = []
    seeds = range(arguments.seeds)
    for ranks in arguments.ranks:
        jobs = [
            job
            for task in arguments.task
            for job in jobs_of(task, arguments.codec, ranks=ranks, steps=arguments.steps)
        ]
        began = time.perf_counter()
        for result in run_jobs(jobs, world_size=ranks, seeds=seeds):
            if not cells or (cells[-1].job, cells[-1].ranks) != (result.job, ranks):
                cells.append(Cell(job=result.job, ranks=ranks))
            cells[-1].add(result)
            if cells[-1].reason is None and len(cells[-1].runs) < len(seeds):
                continue
            outcome = cells[-1].reason or "done"
            took = f"{time.perf_counter() - began:.1f} s"
            print(
                f"{ranks} ranks, {result.job.task}, {result.job.row}: {outcome}, {took}",
                file=sys.stderr,
            )
            began = time.perf_counter()
            if arguments.json:
                write_json(arguments.json, meta=meta, rows=summarize(cells))
    return cells


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults that depend on --quick filled in."""
    parser = argparse.ArgumentParser(
        description="Final loss of small trainings with compressed gradients, beside fp32 DDP's."
    )
    add = parser.add_argument
    quick_codecs = ", ".join(QUICK_CODECS)
    add("--quick", action="store_true", help=f"two minutes: 2 seeds, 2 ranks, {quick_codecs}")
    add("--json", type=Path, metavar="PATH", help="write the rows here, after every row")
    add("--codec", action="append", metavar="NAME", help="default: all there are; repeatable")
    add("--task", action="append", choices=TASKS, help="default: both; repeatable")
    add("--ranks", action="append", type=int, choices=(2, 4), help="default: 2 and 4; repeatable")
    add("--steps", type=int, metavar="N", help="of every training; default: the task's own")
    add("--seeds", type=int, metavar="N", help="5, quick: 2; seeds are 0 to N - 1")
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    codecs = arguments.codec or (QUICK_CODECS if quick else [*CODECS, "powersgd:two_phase=true"])
    arguments.codec = list(dict.fromkeys(codecs))
    arguments.task = list(dict.fromkeys(arguments.task or TASKS))
    arguments.ranks = list(dict.fromkeys(arguments.ranks or ([2] if quick else [2, 4])))
    arguments.seeds = arguments.seeds or (2 if quick else 5)
    if arguments.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {arguments.seeds}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Measure, show, and write."""
    arguments = parse_arguments(argv)
    listed = {name: value for name, value in vars(arguments).items() if name != "json"}
    meta = collect_meta(seed=0, arguments=listed)
    try:
        cells = measure(arguments, meta)
    except KeyboardInterrupt:
        sys.exit(130)
    except WorldFailed as error:
        sys.exit(f"convergence: the ranks did not start: {error}")
    rows = summarize(cells)
    print_tables(meta, rows, *(f"convergence-{task}" for task in arguments.task))
    if differing := [row["row"] for row in rows if row["replicas_identical"] is False]:
        sys.exit(f"convergence: replicas differ with {', '.join(differing)}")


Row = dict[str, Any]


@dataclass(kw_only=True)
class Cell:
    """All runs of one row of one task in one world."""

    job: Job
    ranks: int
    runs: list[Run] = field(default_factory=list)
    reason: str | None = None  # why it did not run, or what broke it

    def add(self, result: Run | Refused) -> None:
        if isinstance(result, Refused):
            self.reason = result.reason
        else:
            self.runs.append(result)


def summarize(cells: Sequence[Cell]) -> list[Row]:
    """One row of the JSON for every cell, compared with DDP's runs with the same seeds."""
    reference = {(c.job.task, c.ranks): c.runs for c in cells if c.job.codec is None}
    return [_row(cell, reference.get((cell.job.task, cell.ranks), [])) for cell in cells]


def _row(cell: Cell, reference: Sequence[Run]) -> Row:
    runs = cell.runs
    names = list(runs[0].metrics) if runs else []
    return {
        "task": cell.job.task,
        "ranks": cell.ranks,
        "row": cell.job.row,
        "codec": cell.job.codec or DDP_ROW,
        "error_feedback": runs[0].error_feedback if runs else None,
        "seeds": [run.seed for run in runs],
        "metrics": {name: _metric(name, runs, reference) for name in names},
        "bytes_ratio": mean(run.bytes_ratio for run in runs) if runs else None,
        "replicas_identical": all(run.identical for run in runs) if runs else None,
        "seconds_per_run": round(mean(run.seconds for run in runs), 2) if runs else None,
        "reason": cell.reason,
    }


def _metric(name: str, runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, Any]:
    """Statistics of one metric; None for what an infinite or missing value leaves undefined."""
    values = [run.metrics[name] for run in runs]
    ddp = {run.seed: run.metrics[name] for run in reference}
    pairs = [(run.metrics[name], ddp[run.seed]) for run in runs if run.seed in ddp]
    percent = [100 * (ours - theirs) / theirs for ours, theirs in pairs]
    spread, difference = _std(list(ddp.values())), _mean([ours - theirs for ours, theirs in pairs])
    return {
        "values": [value if math.isfinite(value) else None for value in values],
        "mean": _mean(values),
        "std": _std(values),
        "diff_pct_of_ddp": _mean(percent),
        "diff_pct_std": _std(percent),
        "within_ddp_spread": (
            None
            if spread is None or not pairs
            else difference is not None and abs(difference) <= spread
        ),
    }


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values and all(map(math.isfinite, values)) else None


def _std(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


if __name__ == "__main__":
    main()
