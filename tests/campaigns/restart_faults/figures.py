"""What a killed rank costs: seconds to the first new step, and samples, in three ways to resume.

Real torchrun processes; 2 ranks, a checkpoint every 10 steps, rank 1 struck after step 25.
``ours``: torchrun starts again, ElasticRestart goes on. The others are resumed by a new torchrun at
once when the old one has ended, as by somebody who waits for it: a person's time is not counted.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import processes

from tests.campaigns.restart_faults.figures_rank import HANG_TIMEOUT_S, SAMPLES, STRUCK

WAYS = {
    "ours": "ElasticRestart, compressed_ddp int8",
    "lightning": "Lightning ddp, ckpt_path by hand",
    "accelerate": "Accelerate, load_state by hand",
}
_LIMIT_S = 150.0
_REPOSITORY = Path(__file__).resolve().parents[3]


def measure(way: str, action: str = "kill") -> dict[str, Any]:
    """One round: train, be struck, resume, finish."""
    restarts = 3 if way == "ours" else 0
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        launches, codes = [], []
        for start in range(2):
            launches.append(time.time())
            ended = processes.run(
                [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
                 "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
                 f"--max-restarts={restarts}", "-m", "tests.campaigns.restart_faults.figures_rank",
                 way, folder, action],
                limit=_LIMIT_S,
                PYTHONPATH=os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]),
                OMP_NUM_THREADS="1",
                FIGURE_START=str(start),
            )  # fmt: skip
            codes.append(ended.returncode)
            if ended.returncode == 0:
                break
        if codes[-1] != 0:
            raise RuntimeError(f"{way} did not end: {codes}\n{ended.output[-3000:]}")
        return {"way": way, "action": action, **_account(Path(folder), launches[0])}


def _account(folder: Path, launched: float) -> dict[str, Any]:
    lines = [
        {**json.loads(text), "rank": path.stem}
        for path in folder.glob("rank-*.jsonl")
        for text in path.read_text().splitlines()
    ]
    struck = float((folder / "struck").read_text())
    after = [line for line in lines if line["time"] > struck and line["attempt"] != "0/0"]
    first = [line for line in lines if line["attempt"] == "0/0"]
    committed = {(line["step"], line["rank"]): line["ids"]
                 for line in sorted(lines, key=lambda line: line["time"])}  # fmt: skip
    ids = sorted(each for of_step in committed.values() for each in of_step)
    times = sorted(line["time"] for line in first if line["rank"] == "rank-0")
    gaps = [late - early for early, late in itertools.pairwise(times)]
    return {
        "recovery_s": round(min(x["time"] for x in after if x["step"] > STRUCK) - struck, 2),
        "first_step_again_s": round(min(x["time"] for x in after) - struck, 2),
        "samples_redone": sum(len(x["ids"]) for x in after if x["step"] <= STRUCK),
        "ids_exact": ids == list(range(SAMPLES)),
        "samples_missed": len(set(range(SAMPLES)) - set(ids)),
        "samples_twice": len(ids) - len(set(ids)),
        "first_start_s": round(times[0] - launched, 2),
        "step_s": round(statistics.median(gaps), 3),
    }


def run_figures(rounds: int, *, stops: int) -> list[dict[str, Any]]:
    """Rounds of every way in turn, then rounds with a stopped rank; medians."""
    found = [measure(way) for _ in range(rounds) for way in WAYS]
    found += [measure("ours", "stop") for _ in range(stops)]
    return [_row(found, way, "kill") for way in WAYS] + (
        [_row(found, "ours", "stop")] if stops else []
    )


def _row(found: Sequence[dict[str, Any]], way: str, action: str) -> dict[str, Any]:
    rounds = [each for each in found if (each["way"], each["action"]) == (way, action)]
    row: dict[str, Any] = {"way": WAYS[way], "fault": action, "rounds": len(rounds)}
    if action == "stop":
        row["hang_timeout"] = HANG_TIMEOUT_S
    for name in ("recovery_s", "first_step_again_s", "samples_redone", "samples_missed",
                 "samples_twice", "first_start_s", "step_s"):  # fmt: skip
        row[name] = round(statistics.median(each[name] for each in rounds), 3)
    row["ids_exact"] = all(each["ids_exact"] for each in rounds)
    return row
