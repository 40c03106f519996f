"""Faults of every kind, and an account of every sample: whether a training goes on as if unhurt.

``restart``: small trainings under ElasticRestart (``--trainer loop``: in an ElasticLoop around DDP)
and torch's elastic agent, with real processes and signals. Every trial is drawn from the seed and
its number, and judged: the job ends within a bound and leaves no process, every epoch's samples are
committed once, ranks agree after every step, and the weights are those of the run without a fault:
to the bit with the same number of ranks, else to 1e-4 of the largest (codec none, no dropout).
tests/campaigns/restart_faults/oracle.py says what is counted.
struck: trials whose fault was met; within: those that went on within an epoch; new_step_s: from the
last fault to a step that had not been done before, by another process.

    python -m tests.campaigns.restart_faults --trials N --seed S --json FILE
"""

import ctypes
import fcntl
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import elastic_jobs
import elastic_runs  # noqa: F401  (forks have imported all)
import loop_runs  # noqa: F401
import psutil
import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.harness.results import recording
from lightning_dist import CompressedDDPStrategy
from tests.campaigns.harness import parser_of_trials, run_trials
from tests.campaigns.restart_faults.drawing import EPOCHS, HANG_TIMEOUT_S, KINDS, Setup, Trial, draw
from tests.campaigns.restart_faults.oracle import PROBLEMS, Verdict, judge


def main() -> int:
    parser = parser_of_trials(__doc__, folder="where to write, and to keep what failed")
    parser.add_argument("--trainer", choices=["lightning", "loop"], default="lightning")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seconds", type=float, help="begin no trial after that")
    given = parser.parse_args()
    drawing = {"seed": given.seed, "kinds": given.kinds, "is_loop": given.trainer == "loop"}
    with (
        recording(given, seed=given.seed) as record,
        tempfile.TemporaryDirectory(prefix="faults") as temporary,
    ):
        root = given.folder or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        deadline = None if given.seconds is None else time.monotonic() + given.seconds
        return run_trials(
            "restart",
            Campaign(str(root), deadline).run,
            [draw(number, **drawing) for number in range(given.trials)],
            given=given,
            record=record,
            problems=PROBLEMS,
            figures=figures_of_kind,
            initializer=adopt_orphans,
        )


_LINGER_S = 10.0
"""For a writer that its trainer has left: to end what it has begun."""
_PR_SET_CHILD_SUBREAPER = 36


def job_of(trial: Trial, folder: Path) -> elastic_jobs.Job:
    """The trainings of tests/support/, for the faults of a trial."""
    setup = trial.setup
    elastic = {
        "max_to_keep": trial.keep,
        "batch_policy": trial.policy,
        **({"hang_timeout": HANG_TIMEOUT_S} if trial.has_stop else {}),
    }
    common = {
        "name": f"trial-{trial.number}",
        "folder": str(folder),
        "worlds": list(trial.worlds),
        "faults": trial.faults,
        "max_restarts": trial.max_restarts,
        "loader": {"batch_size": setup.batch, "drop_last": setup.drop_last},
        "limit": trial.bound,
    }
    data = {"size": setup.size, "noisy": setup.noisy}
    codec = None if setup.codec == "ddp" else setup.codec
    if trial.is_loop:
        elastic |= {
            "every_n_train_steps": trial.every,
            "gradient_accumulation_steps": setup.accumulate,
        }
        fit = {**data, "epochs": EPOCHS, "elastic": elastic}
        return elastic_jobs.Job(**common, codec=codec, framework="plain", fit=fit)
    elastic |= {"every_n_train_steps": trial.every, "format": trial.format}
    fit = {
        "elastic": elastic,
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": setup.accumulate,
        **_strategy_of(setup),
    }
    return elastic_jobs.Job(**common, module={"noisy": setup.noisy}, dataset=data, fit=fit)


def _strategy_of(setup: Setup) -> dict[str, Any]:
    """DDP puts its buckets in another order after the first step of a process.

    Sums of three ranks or more are then taken in another order, and a restart would show in their
    last bits; looking for unused parameters keeps the first order.
    """
    unused = {"find_unused_parameters": setup.world > 2}
    if setup.codec == "ddp":
        return {"strategy": DDPStrategy(**unused), "devices": setup.world}
    strategy = CompressedDDPStrategy(codec=setup.codec, min_compress_numel=0, **unused)
    return {"strategy": strategy, "devices": "auto"}


def run_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """All starts of a trial; forks, so this process must have no other thread."""
    folder.mkdir(parents=True)
    return elastic_jobs.run_job(job_of(trial, folder), folder / "results.json")


@dataclass(frozen=True)
class Campaign:
    """What all trials share."""

    root: str
    deadline: float | None
    """Trials that have not begun by then (time.monotonic) are left out."""

    def reference(self, setup: Setup, *, is_loop: bool) -> Path:
        """What the training without a fault leaves; run once, when it is first asked for."""
        folder = Path(self.root) / f"reference-{'-'.join(map(str, asdict(setup).values()))}"
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                worlds = [setup.world]
                trial = Trial(-1, kind="reference", setup=setup, worlds=worlds, is_loop=is_loop)
                result = run_trial(trial, folder)
                if result["codes"] != ["ok"]:
                    raise RuntimeError(f"{setup} does not run without a fault: {result}")
        return folder

    def run(self, trial: Trial) -> Verdict | None:
        """One trial, judged."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            return None
        verdict = Verdict(trial.kind, trial.number, trial=trial)
        folder, result = Path(self.root) / str(trial.number), {"seconds": 0.0}
        with verdict.judging():
            reference = self.reference(trial.setup, is_loop=trial.is_loop)
            result = run_trial(trial, folder)
            left = end_children()
            verdict.require(not left, "hang", f"left behind: {left}")
            judge(verdict, result, folder, reference)
        verdict.seconds = result["seconds"]  # of the job
        if not verdict.problems:
            shutil.rmtree(folder, ignore_errors=True)
        return verdict


def adopt_orphans() -> None:
    """Become the parent of what a trial leaves behind, so that it can be found."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> list[str]:
    """Kill children that do not end by themselves soon; their command lines."""
    limit, found = time.monotonic() + _LINGER_S, []
    while children := psutil.Process().children():
        left = max(0.0, limit - time.monotonic())
        _, alive = psutil.wait_procs(children, timeout=left)
        for child in alive:
            with suppress(psutil.NoSuchProcess):
                found.append(" ".join(child.cmdline()))
                child.kill()
        psutil.wait_procs(alive)
    return found


def figures_of_kind(found: Sequence[Verdict]) -> dict[str, Any]:
    """The row of a kind."""
    recoveries = [each.recovery_s for each in found if each.recovery_s is not None]
    return {
        "struck": sum(each.fired > 0 for each in found),
        "within": sum(bool(each.resumed_at) for each in found),
        "failed": sum(bool(each.problems) for each in found),
        "median_s": round(statistics.median(each.seconds for each in found), 2),
        "max_s": round(max(each.seconds for each in found), 2),
        "new_step_s": round(statistics.median(recoveries), 2) if recoveries else None,
        "new_step_max_s": round(max(recoveries), 2) if recoveries else None,
        "failures": [asdict(each) for each in found if each.problems],
        "recoveries_s": recoveries,
    }
