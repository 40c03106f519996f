"""Runs the trials of the restart campaign side by side, and counts what broke."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults_oracle import PROBLEMS, Verdict, judge
from benchmarks.faults_ranks import run_job
from benchmarks.faults_trial import Setup, Trial

_LINGER_S = 10.0
"""For a writer that its trainer has left: to end what it has begun."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Campaign:
    """What all trials share."""

    root: str
    deadline: float
    """Trials that have not begun by then (time.monotonic) are left out."""

    def reference(self, setup: Setup, *, is_loop: bool) -> Path:
        """What the training without a fault leaves; run once, when it is first asked for."""
        folder = Path(self.root) / f"reference-{'-'.join(map(str, asdict(setup).values()))}"
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                worlds = [setup.world]
                trial = Trial(-1, kind="reference", setup=setup, worlds=worlds, is_loop=is_loop)
                result = run_job(trial, folder)
                if result["codes"] != ["ok"]:
                    raise RuntimeError(f"{setup} does not run without a fault: {result}")
        return folder

    def run(self, trial: Trial) -> Verdict | None:
        """One trial, judged."""
        if time.monotonic() > self.deadline:
            return None
        verdict, folder = Verdict(trial), Path(self.root) / str(trial.number)
        try:
            reference = self.reference(trial.setup, is_loop=trial.is_loop)
            result = run_job(trial, folder)
            verdict.seconds = result["seconds"]
            left = end_children()
            verdict.require(not left, "hang", f"left behind: {left}")
            judge(verdict, result, folder, reference)
        except Exception:
            verdict.require(False, "report", traceback.format_exc()[-2000:])
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
    while children := _children():
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if time.monotonic() > limit:
            for pid in children:
                with suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(line.decode(errors="replace").strip())
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return found


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


def run_all(trials: Sequence[Trial], *, root: str, seconds: float, workers: int) -> list[Verdict]:
    """In forks of this process, which has all imported."""
    Path(root).mkdir(parents=True, exist_ok=True)
    campaign = Campaign(root, time.monotonic() + seconds)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=adopt_orphans) as pool:
        verdicts = list(pool.map(campaign.run, trials))
    return [verdict for verdict in verdicts if verdict is not None]


def summarize(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """One row per kind; a trial counts once under each problem that it has."""
    rows = []
    for kind in dict.fromkeys(verdict.trial.kind for verdict in verdicts):
        found = [verdict for verdict in verdicts if verdict.trial.kind == kind]
        counts = Counter(name for each in found for name in {name for name, _ in each.problems})
        recoveries = [each.recovery_s for each in found if each.recovery_s is not None]
        row: dict[str, Any] = {"kind": kind, "trials": len(found)}
        row |= {"struck": sum(each.fired > 0 for each in found)}
        row |= {"within": sum(bool(each.resumed_at) for each in found)}
        row |= {"failed": sum(bool(each.problems) for each in found)}
        row |= {problem: counts[problem] for problem in PROBLEMS}
        row["median_s"] = round(statistics.median(each.seconds for each in found), 2)
        row["max_s"] = round(max(each.seconds for each in found), 2)
        row["new_step_s"] = round(statistics.median(recoveries), 2) if recoveries else None
        row["new_step_max_s"] = round(max(recoveries), 2) if recoveries else None
        row["failures"] = [asdict(each) for each in found if each.problems]
        row["each"] = [_told(verdict) for verdict in found]
        rows.append(row)
    return rows


def _told(verdict: Verdict) -> dict[str, Any]:
    names = ("seconds", "recovery_s", "fired", "resumed_at", "error")
    told = {name: getattr(verdict, name) for name in names}
    number, problems = verdict.trial.number, len(verdict.problems)
    return {"number": number, "trial": str(verdict.trial), "problems": problems, **told}
