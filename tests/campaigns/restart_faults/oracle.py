"""What must hold when a trial has ended, and what did not."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import elastic_runs
import torch

from tests.campaigns.restart_faults.drawing import EPOCHS, Setup, Trial

PROBLEMS = ("hang", "end", "ids", "order", "hash", "weights", "report")
"""hang: beyond the bound, or a process left behind; end: the last start did not finish the training
on all ranks; ids: an epoch whose committed samples are not those of the data, each once; order: a
global batch that is not that of the run without a fault; hash: ranks that differ after a step;
weights: not those of the run without a fault; report: the oracle itself failed."""

TOLERANCE = 1e-4
"""Of weights, relative to the largest, where the number of ranks has changed (codec none)."""
_OUTPUT_LINES = 60
_REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass
class Verdict:
    """One trial: how to repeat it, what happened, and what should not have."""

    trial: Trial
    problems: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    recovery_s: float | None = None
    """From the last strike to a step, in another process, that had not been done before."""
    fired: int = 0
    resumed_at: list[int] = field(default_factory=list)
    """Steps within an epoch with which a process has begun."""
    error: float | None = None
    """Of weights, relative, where worlds differ."""
    output: list[str] = field(default_factory=list)

    def require(self, holds: bool, problem: str, what: str) -> None:
        if not holds:
            self.problems.append((problem, without_paths(what)))


def without_paths(text: str) -> str:
    """``text`` without the folders of this machine."""
    for path in (str(_REPOSITORY), sys.prefix, tempfile.gettempdir(), str(Path.home())):
        text = text.replace(path, "...")
    return text


def judge(verdict: Verdict, result: dict[str, Any], folder: Path, reference: Path) -> None:
    """Look at all that a job has left in ``folder``."""
    trial = verdict.trial
    verdict.require(not result["hung"], "hang", f"had not ended after {trial.bound:.0f} s")
    codes = result["codes"]
    verdict.require(codes[-1] == "ok", "end", f"last start: {codes[-1][:300]}")
    _check_ends(verdict, folder)
    times = _fired(folder)
    verdict.fired = len(times)
    verdict.recovery_s = _recovery(folder, times)
    try:
        steps = elastic_runs.committed(folder / "account")
    except AssertionError as error:
        verdict.require(False, "ids", str(error))
        return
    last = _last_step(folder)
    # What a dead start did beyond the last step that counts has been undone with it.
    steps = {number: step for number, step in steps.items() if last is None or number <= last}
    if not steps:
        verdict.require(False, "ids", "no step is committed")
        return
    verdict.resumed_at = _resumed_within_epochs(folder)
    begun = min(_lines(folder), key=lambda line: line["time"])["world"]
    _check_ids(verdict, steps, replace(trial.setup, world=begun))
    if begun != trial.setup.world:
        return  # struck before the first step, and begun with other ranks
    _check_against(verdict, steps, elastic_runs.committed(reference / "account"), folder, reference)
    if verdict.problems:
        text = (folder / "output.txt").read_text(errors="replace")
        verdict.output = without_paths(text).splitlines()[:_OUTPUT_LINES]


def _last_step(folder: Path) -> int | None:
    """Optimizer steps when the training had ended; a larger global batch takes fewer."""
    ends = [json.loads(path.read_text()) for path in folder.glob("end-*.json")]
    return max((end["step"] for end in ends), default=None)


def _check_ends(verdict: Verdict, folder: Path) -> None:
    last = len(verdict.trial.worlds) - 1
    ends = [json.loads(path.read_text()) for path in sorted(folder.glob(f"end-{last}-*.json"))]
    wanted = verdict.trial.worlds[-1]
    verdict.require(len(ends) == wanted, "end", f"{len(ends)} of {wanted} ranks finished")
    same = len({(end["hash"], end["step"]) for end in ends}) <= 1
    verdict.require(same, "hash", f"ranks ended differently: {ends}")
    done = all(end["epoch"] == EPOCHS for end in ends)
    verdict.require(done, "end", f"not after epoch {EPOCHS}: {ends}")


def _check_ids(verdict: Verdict, steps: dict[int, elastic_runs.Step], setup: Setup) -> None:
    trial = verdict.trial
    numbers = list(steps)
    verdict.require(numbers == list(range(1, len(steps) + 1)), "ids", f"steps {numbers}")
    for number, step in steps.items():
        verdict.require(len(step.hashes) == 1, "hash", f"step {number}: {sorted(step.hashes)}")
    largest = setup.batch * setup.accumulate * max(trial.worlds)
    for epoch in range(EPOCHS):
        ids = [each for step in steps.values() if step.epoch == epoch for each in step.ids]
        counts = Counter(ids)
        missing = sorted(set(range(setup.size)) - set(counts))
        twice = sorted(each for each, count in counts.items() if count > 1)
        if setup.drop_last:
            left = setup.size % setup.global_batch
            exact = trial.policy == "constant_global" or len(set(trial.worlds)) == 1
            fits = len(missing) == left if exact else len(missing) < largest
        else:
            fits = not missing
        what = f"epoch {epoch}: missing {missing}, twice {twice}"
        verdict.require(fits and not twice, "ids", what)


def _check_against(
    verdict: Verdict,
    steps: dict[int, elastic_runs.Step],
    wanted: dict[int, elastic_runs.Step],
    folder: Path,
    reference: Path,
) -> None:
    trial = verdict.trial
    same_world = set(trial.worlds) == {trial.setup.world}
    if same_world or trial.policy == "constant_global":
        verdict.require(len(steps) == len(wanted), "order", f"{len(steps)} of {len(wanted)} steps")
        wrong = [n for n in steps if n in wanted and steps[n].ids != wanted[n].ids]
        verdict.require(not wrong, "order", f"other samples in steps {wrong}")
    if same_world:
        off = [n for n in steps if n in wanted and steps[n].hashes != wanted[n].hashes]
        verdict.require(not off, "weights", f"other weights from step {min(off, default=0)} on")
        mine, theirs = _end_hash(folder), _end_hash(reference)
        verdict.require(mine == theirs, "weights", f"ended with {mine}, not {theirs}")
    elif trial.policy == "constant_global" and trial.setup.codec != "int8":
        verdict.error = _difference(folder, reference)
        close = verdict.error is not None and verdict.error <= TOLERANCE
        verdict.require(close, "weights", f"relative difference {verdict.error}")


def _last(folder: Path, pattern: str) -> Path | None:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime, default=None)


def _end_hash(folder: Path) -> str | None:
    path = _last(folder, "end-*-0.json")
    return None if path is None else json.loads(path.read_text())["hash"]


def _difference(folder: Path, reference: Path) -> float | None:
    paths = [_last(each, "weights-*.pt") for each in (folder, reference)]
    if None in paths:
        return None
    mine, theirs = (torch.load(path) for path in paths)
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) / largest


def _fired(folder: Path) -> list[float]:
    return sorted(float(path.read_text()) for path in folder.glob("fired-*"))


def _lines(folder: Path) -> list[dict[str, Any]]:
    paths = (folder / "account").glob("rank-0.jsonl")
    return [json.loads(text) for path in paths for text in path.read_text().splitlines()]


def _resumed_within_epochs(folder: Path) -> list[int]:
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in _lines(folder):
        first.setdefault(tuple(line["attempt"]), line)
    ends = {line["step"]: line["epoch"] for line in _lines(folder)}
    return [
        line["step"]
        for line in first.values()
        if line["step"] > 1 and ends.get(line["step"] - 1) == line["epoch"]
    ]


def _recovery(folder: Path, times: list[float]) -> float | None:
    lines = _lines(folder)
    if not times or not lines:
        return None
    early = [line for line in lines if line["time"] <= times[-1]]
    struck = early[-1]["attempt"] if early else None
    before = max((x["step"] for x in lines if x in early or x["attempt"] == struck), default=0)
    after = [line["time"] for line in lines if line["step"] > before and line["time"] > times[-1]]
    return min(after) - times[-1] if after else None
