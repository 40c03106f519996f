"""Faults of every kind, and an account of every sample: whether a training goes on as if unhurt.

``restart``: small trainings under ElasticRestart (``--trainer loop``: in an ElasticLoop around DDP)
and torch's elastic agent, with real processes and signals. Every trial is drawn from the seed and
its number, and judged: the job ends within a bound and leaves no process, every epoch's samples are
committed once, ranks agree after every step, and the weights are those of the run without a fault:
to the bit with the same number of ranks, else to 1e-4 of the largest (codec none, no dropout).
benchmarks/faults_oracle.py says what is counted.
struck: trials whose fault was met; within: those that went on within an epoch; new_step_s: from the
last fault to a step that had not been done before, by another process.

    python -m benchmarks.faults --campaign restart --trials N --seed S --json FILE [--kinds ...]
    python -m benchmarks.faults --figures --rounds N --json FILE

The second form measures what a killed or stopped rank costs, beside what others do.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.faults_drawing import KINDS, draw
from benchmarks.faults_figures import run_figures
from benchmarks.faults_oracle import PROBLEMS
from benchmarks.faults_restart import run_all, summarize
from benchmarks.faults_trial import Trial
from benchmarks.report import collect_meta, print_table, write_json


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--campaign", choices=["restart"], default="restart")
    parser.add_argument("--trainer", choices=["lightning", "loop"], default="lightning")
    parser.add_argument("--trials", type=int, help="default 100; 0 with --figures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--number", type=int, help="only the trial of this number")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial after that")
    parser.add_argument("--folder", help="where to write, and to keep what failed")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--figures", action="store_true", help="after the trials, if any")
    parser.add_argument("--rounds", type=int, default=3, help="of figures")
    arguments = parser.parse_args()
    hidden = ("json", "folder")
    meta = collect_meta(
        seed=arguments.seed,
        arguments={name: str(value) for name, value in vars(arguments).items()
                   if name not in hidden},
    )  # fmt: skip
    drawn = arguments.trials
    if drawn is None:
        drawn = 0 if arguments.figures else 100
    trials = [
        draw(
            number,
            seed=arguments.seed,
            kinds=arguments.kinds,
            is_loop=arguments.trainer == "loop",
        )
        for number in range(drawn)
        if arguments.number in (None, number)
    ]
    rows, failed = _run_trials(trials, arguments, meta) if trials else ([], 0)
    if arguments.figures:
        rows += _measure(arguments.rounds)
    if arguments.json:
        write_json(arguments.json, meta=meta, rows=rows)
    return 1 if failed else 0


def _run_trials(
    trials: Sequence[Trial], arguments: argparse.Namespace, meta: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults") as temporary:
        root = arguments.folder or temporary
        verdicts = run_all(trials, root=root, seconds=arguments.seconds, workers=arguments.workers)
    meta["seconds"] = round(time.monotonic() - began, 1)
    meta["trials"] = len(verdicts)
    meta["trials_per_minute"] = round(len(verdicts) * 60 / meta["seconds"], 1)
    rows = summarize(verdicts)
    columns = ["kind", "trials", "struck", "within", "failed", *PROBLEMS, "median_s", "max_s"]
    columns += ["new_step_s", "new_step_max_s"]
    title = f"restart: {len(verdicts)} trials in {meta['seconds']} s"
    print_table(title, columns=columns, rows=[[row[name] for name in columns] for row in rows])
    failed = [verdict for verdict in verdicts if verdict.problems]
    for verdict in failed:
        print(f"trial {verdict.trial.number}: {verdict.problems[:3]}\n  {asdict(verdict.trial)}")
    return rows, len(failed)


def _measure(rounds: int) -> list[dict[str, Any]]:
    rows = run_figures(rounds, stops=max(1, rounds // 3))
    columns = ["way", "fault", "rounds", "recovery_s", "first_start_s", "samples_redone",
               "samples_missed", "samples_twice", "ids_exact", "step_s"]  # fmt: skip
    cells = [[_two_digits(row[name]) for name in columns] for row in rows]
    print_table("from the fault to the first new step", columns=columns, rows=cells)
    return rows


def _two_digits(value: Any) -> Any:
    return f"{value:.2f}" if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())
