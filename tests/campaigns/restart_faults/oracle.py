"""What must hold when a trial has ended, and what did not."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elastic_runs
import torch

from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.reading import load
from tests.campaigns import harness
from tests.campaigns.restart_faults.drawing import EPOCHS, Setup, Trial

PROBLEMS = ("hang", "end", "ids", "order", "hash", "weights", "report")
"""hang: beyond the bound, or a process left behind; end: the last start did not finish the training
on all ranks; ids: an epoch whose committed samples are not those of the data, each once; order: a
global batch that is not that of the run without a fault; hash: ranks that differ after a step;
weights: not those of the run without a fault; report: the oracle itself failed."""

TOLERANCE = 1e-4
"""Of weights, relative to the largest, where the number of ranks has changed (codec none)."""
_OUTPUT_LINES = 60


@dataclass
class Verdict(harness.Verdict):
    """One trial: how to repeat it, what happened, and what should not have."""

    trial: Trial | None = None
    recovery_s: float | None = None
    """From the last strike to a step, in another process, that had not been done before."""
    fired: int = 0
    resumed_at: list[int] = field(default_factory=list)
    """Steps within an epoch with which a process has begun."""
    error: float | None = None
    """Of weights, relative, where worlds differ."""
    output: list[str] = field(default_factory=list)


def judge(verdict: Verdict, result: dict[str, Any], folder: Path, reference: Path) -> None:
    """Look at all that a job has left in ``folder``."""
    trial = verdict.trial
    verdict.require(not result["hung"], "hang", f"had not ended after {trial.bound:.0f} s")
    codes = result["codes"]
    verdict.require(codes[-1] == "ok", "end", f"last start: {codes[-1][:300]}")
    ends = _ends(folder)
    _check_ends(verdict, ends)
    fired = sorted(float(path.read_text()) for path in folder.glob("fired-*"))
    lines = _lines(folder)
    verdict.fired = len(fired)
    verdict.recovery_s = _recovery(lines, fired)
    try:
        steps = elastic_runs.committed(folder / "account")
    except AssertionError as error:
        verdict.require(False, "ids", str(error))
        return
    # What a dead start did beyond the last step that counts has been undone with it. That is when
    # the training had ended; a larger global batch takes fewer steps.
    last = max((end["step"] for end in ends), default=max(steps, default=0))
    steps = {number: step for number, step in steps.items() if number <= last}
    if not steps:
        verdict.require(False, "ids", "no step is committed")
        return
    verdict.resumed_at = _resumed_within_epochs(lines)
    begun = min(lines, key=lambda line: line["time"])["world"]
    _check_ids(verdict, steps, trial.setup, begun=begun)
    if begun != trial.setup.world:
        return  # struck before the first step, and begun with other ranks
    _check_against(verdict, steps, folder, reference)
    if verdict.problems:
        text = (folder / "output.txt").read_text(errors="replace")
        verdict.output = harness.without_paths(text).splitlines()[:_OUTPUT_LINES]


def _ends(folder: Path) -> list[dict[str, Any]]:
    """What ranks have said at the end of the training, by start and rank."""
    return [
        {"start": path.stem.split("-")[1], **json.loads(path.read_text())}
        for path in sorted(folder.glob("end-*.json"))
    ]


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The account of rank 0, a line for every step."""
    path = folder / "account" / "rank-0.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def _check_ends(verdict: Verdict, ends: list[dict[str, Any]]) -> None:
    worlds = verdict.trial.worlds
    ends = [end for end in ends if end["start"] == str(len(worlds) - 1)]
    verdict.require(len(ends) == worlds[-1], "end", f"{len(ends)} of {worlds[-1]} ranks finished")
    same = len({(end["hash"], end["step"]) for end in ends}) <= 1
    verdict.require(same, "hash", f"ranks ended differently: {ends}")
    done = all(end.get("epoch", EPOCHS) == EPOCHS for end in ends)  # a loop of the user's has none
    verdict.require(done, "end", f"not after epoch {EPOCHS}: {ends}")


def _check_ids(
    verdict: Verdict, steps: dict[int, elastic_runs.Step], setup: Setup, *, begun: int
) -> None:
    """Every sample once in each epoch; ``begun``: the number of ranks that did the first step."""
    trial = verdict.trial
    # The micro-batch stays that of the job, also where it was struck before its first step.
    global_batch = setup.batch * setup.accumulate * begun
    verdict.require(list(steps) == list(range(1, len(steps) + 1)), "ids", f"steps {list(steps)}")
    for number, step in steps.items():
        verdict.require(len(step.hashes) == 1, "hash", f"step {number}: {sorted(step.hashes)}")
    for epoch in range(EPOCHS):
        counts = Counter(
            each for step in steps.values() if step.epoch == epoch for each in step.ids
        )
        missing = sorted(set(range(setup.size)) - set(counts))
        twice = sorted(each for each, count in counts.items() if count > 1)
        fits = not missing
        if setup.drop_last:
            if trial.policy == "fixed_global_batch" or len(set(trial.worlds)) == 1:
                fits = len(missing) == setup.size % global_batch
            else:
                fits = len(missing) < setup.batch * setup.accumulate * max(trial.worlds)
        what = f"epoch {epoch}: missing {missing}, twice {twice}"
        verdict.require(fits and not twice, "ids", what)


def _check_against(
    verdict: Verdict, steps: dict[int, elastic_runs.Step], folder: Path, reference: Path
) -> None:
    """Beside the run without a fault: global batches; weights, where they can be the same."""
    trial, wanted = verdict.trial, elastic_runs.committed(reference / "account")
    same_world = set(trial.worlds) == {trial.setup.world}
    if same_world or trial.policy == "fixed_global_batch":
        verdict.require(len(steps) == len(wanted), "order", f"{len(steps)} of {len(wanted)} steps")
        wrong = [n for n in steps if n in wanted and steps[n].ids != wanted[n].ids]
        verdict.require(not wrong, "order", f"other samples in steps {wrong}")
    if same_world:
        off = [n for n in steps if n in wanted and steps[n].hashes != wanted[n].hashes]
        verdict.require(not off, "weights", f"other weights from step {min(off, default=0)} on")
        mine, theirs = ([end["hash"] for end in _ends(each)][-1:] for each in (folder, reference))
        verdict.require(mine == theirs, "weights", f"ended with {mine}, not {theirs}")
    elif trial.policy == "fixed_global_batch" and trial.setup.codec != "int8":
        mine, theirs = (_weights(each) for each in (folder, reference))
        verdict.error = harness.relative_difference(mine, theirs)
        close = verdict.error <= TOLERANCE
        verdict.require(close, "weights", f"relative difference {verdict.error}")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, which is taken when the training has ended."""
    newest = newest_valid(str(folder / "ckpt"))
    assert newest is not None
    state = load(newest.path, weights_only=False)
    return state["objects"]["model"] if "objects" in state else state["state_dict"]


def _resumed_within_epochs(lines: list[dict[str, Any]]) -> list[int]:
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in lines:
        first.setdefault(tuple(line["attempt"]), line)
    ends = {line["step"]: line["epoch"] for line in lines}
    return [
        line["step"]
        for line in first.values()
        if line["step"] > 1 and ends.get(line["step"] - 1) == line["epoch"]
    ]


def _recovery(lines: list[dict[str, Any]], fired: list[float]) -> float | None:
    """Seconds from the last fault to a step not done before, by another process."""
    if not fired:
        return None
    early = [line for line in lines if line["time"] <= fired[-1]]
    struck = early[-1]["attempt"] if early else None
    before = max((x["step"] for x in lines if x in early or x["attempt"] == struck), default=0)
    after = [line["time"] for line in lines if line["step"] > before and line["time"] > fired[-1]]
    return min(after) - fired[-1] if after else None
