"""Does a job under plain torchrun come back after one of its ranks died?

torchrun starts a small training on two ranks, one of them ends without a word in the middle, and
torchrun starts all of them again. Counted per rendezvous backend and strategy: jobs that came to
their end, that failed, and that were still running after 90 seconds.

    python -m benchmarks.restart.rendezvous --trials N --seed S --json FILE
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness.launch import end_job, free_port, start_job
from benchmarks.harness.results import parser_of, recording
from benchmarks.harness.testbed import exit_on_signals
from benchmarks.restart.tables import RENDEZVOUS

BACKENDS = ("c10d", "static", "standalone")
STRATEGIES = ("compressed_ddp", "ddp")
OUTCOMES = ("finished", "failed", "hung")
_RANKS = 2
_STEPS = 8
_BOUND_S = 90.0
_LINES = 40


@dataclass(frozen=True)
class Trial:
    """One job, and what became of it; ``said``: the last lines of one that did not finish."""

    backend: str
    strategy: str
    victim: int
    step: int
    outcome: str = ""
    seconds: float = 0.0
    said: tuple[str, ...] = ()


def planned(trials: int, *, stock: int, seed: int) -> list[Trial]:
    """All jobs; strategies and backends take turns, so that load of the machine meets all.

    The first ``stock`` rounds have ``ddp`` too, whose hangs take their bound each.
    """
    draw = random.Random(seed)
    jobs = []
    for number in range(trials):
        strategies = STRATEGIES if number < stock else STRATEGIES[:1]
        victim, step = draw.randrange(_RANKS), draw.randrange(1, _STEPS)
        turn = [Trial(*each, victim, step) for each in itertools.product(BACKENDS, strategies)]
        draw.shuffle(turn)
        jobs += turn
    return jobs


def run(trial: Trial) -> Trial:
    """The trial with its outcome; nothing of the job is left."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="restart") as folder:
        output = Path(folder) / "output"
        job = _job(trial, output)
        try:
            outcome = "failed" if job.wait(_BOUND_S) else "finished"
        except subprocess.TimeoutExpired:
            outcome = "hung"
        finally:
            end_job(job)
        text = output.read_text(errors="replace")
        if not (Path(folder) / "died").exists():
            raise RuntimeError(f"no rank died in {trial}: {text}")
    said = () if outcome == "finished" else tuple(text.splitlines()[-_LINES:])
    seconds = round(time.monotonic() - began, 2)
    return replace(trial, outcome=outcome, seconds=seconds, said=said)


def _job(trial: Trial, output: Path) -> subprocess.Popen[bytes]:
    port = free_port()
    backend = {
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"],
        "static": [f"--master-port={port}"],
        "standalone": ["--standalone"],
    }[trial.backend]
    launcher = ["-m", "torch.distributed.run", *backend]
    options = [f"--nproc-per-node={_RANKS}", "--max-restarts=1"]
    training = ["-m", "benchmarks.restart.rendezvous", trial.strategy, str(output.parent)]
    return start_job([*launcher, *options, *training, str(trial.victim), str(trial.step)], output)


def summarize(trials: list[Trial]) -> list[dict[str, Any]]:
    """Counts of every backend and strategy, and the seconds of the jobs that finished."""
    rows = []
    for key in sorted({(each.backend, each.strategy) for each in trials}):
        of_row = [each for each in trials if (each.backend, each.strategy) == key]
        outcomes = [each.outcome for each in of_row]
        seconds = [each.seconds for each in of_row if each.outcome == "finished"]
        row = dict(zip(("backend", "strategy"), key, strict=True))
        row |= {"trials": len(of_row), **{name: outcomes.count(name) for name in OUTCOMES}}
        rows.append({**row, "median_s": statistics.median(seconds) if seconds else None})
    return rows


def train(strategy: str, folder: str, victim: str, step: str) -> None:
    """64 samples through one layer on this rank; the victim dies at its step of the first start."""
    import lightning as L
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    import lightning_dist  # noqa: F401  (registers the strategy)

    mark = Path(folder) / "died"

    class Mortal(BoringModel):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if (self.global_rank, batch_idx) == (int(victim), int(step)) and not mark.exists():
                mark.touch()
                os._exit(3)
            return super().training_step(batch, batch_idx)

    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=_STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mortal())


def main() -> None:
    if "RANK" in os.environ:
        train(*sys.argv[1:])
        return
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=20, help="of every backend and strategy")
    parser.add_argument("--stock", type=int, help="trials of ddp, if not as many")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    stock = given.trials if given.stock is None else given.stock
    jobs = planned(given.trials, stock=stock, seed=given.seed)
    done = []
    with recording(given, seed=given.seed) as record, exit_on_signals():
        record.meta["versions"]["lightning"] = version("lightning")
        for number, job in enumerate(jobs, start=1):
            done.append(run(job))
            print(number, "of", len(jobs), done[-1], flush=True)
            record.rows = summarize(done)
            record.write()
        record.show(RENDEZVOUS)


if __name__ == "__main__":
    main()
