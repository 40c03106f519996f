"""History of a short run of examples/lightning_cli, which docs/wandb.md shows as panels.

A CSVLogger beside the example's WandbLogger gets the same metrics at the same steps.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.results import parser_of, positive, recording

EXAMPLE = REPOSITORY / "examples" / "lightning_cli"


def history(steps: int) -> list[dict[str, float]]:
    """One row for each step that something was logged at."""
    options = {
        "limit_train_batches": steps,
        "val_check_interval": max(1, steps // 6),
        "log_every_n_steps": 4,
        "enable_progress_bar": "false",
        "logger+": "lightning.pytorch.loggers.CSVLogger",
        "logger.init_args.save_dir": "csv",
    }
    command = [sys.executable, EXAMPLE / "train.py", "fit", "--config", EXAMPLE / "config.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, *(f"--trainer.{name}={value}" for name, value in options.items())],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "offline"},
            stdout=sys.stderr,
            check=True,
        )
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for log in Path(folder).glob("csv/**/metrics.csv"):
            with log.open(newline="") as file:
                for row in csv.DictReader(file):
                    found = {name: float(f"{float(v):.5g}") for name, v in row.items() if v}
                    rows[int(row["step"])] |= found
    return [{**rows[step], "step": step} for step in sorted(rows)]


def main() -> None:
    """Train, and keep what was logged."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=positive, default=120)
    given = parser.parse_args()
    with recording(given, seed=7) as record:
        record.rows += history(given.steps)


if __name__ == "__main__":
    main()
