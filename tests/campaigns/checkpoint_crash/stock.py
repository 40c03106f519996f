"""The same trainer with Lightning's own AsyncCheckpointIO, saving as ModelCheckpoint does."""

from __future__ import annotations

import os
import pickle
import random
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.campaigns.checkpoint_crash.disk import SlowGate
from tests.campaigns.checkpoint_crash.oracle import Ledger, Verdict
from tests.campaigns.checkpoint_crash.trainer import (
    EVERY,
    STEPS,
    TOTAL,
    Child,
    Gate,
    Report,
    Run,
    Training,
)
from tests.campaigns.checkpoint_crash.trials import Trial, any_moment

KINDS = ("stock: kill the trainer", "stock: slow disk")


class _ReportingIO(TorchCheckpointIO):
    """Says when a file is complete, and waits for the gate before."""

    def __init__(self, report: Report, gate: Gate) -> None:
        self._report, self._gate = report, gate

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if isinstance(self._gate, SlowGate):
            self._gate.pass_through()
        super().save_checkpoint(checkpoint, path, storage_options)
        self._report("committed", step=checkpoint["step"], target=str(path))


def train(run: Run, steps: int, report: Report, *, gate: Gate | None = None) -> None:
    """Go on from the newest file that loads, or begin, and train up to ``steps``."""
    gate = gate or Gate()
    training = Training()
    found = newest_loadable(run.folder)
    if found is not None:
        training.restore(found)
    superseded = [str(path) for path in _files(run.folder)]
    io = AsyncCheckpointIO(_ReportingIO(report, gate))
    report("opened", step=training.step, seconds=0.0)
    while training.step < steps:
        training.advance()
        report("step", step=training.step)
        if training.step % EVERY == 0:
            target = run.target(training.step)
            gate.open()
            io.save_checkpoint(training.state(), target)
            for path in superseded:  # at once, as ModelCheckpoint of lightning 2.6.6 does
                io.remove_checkpoint(path)
            superseded = [target]
            report("saved", step=training.step)
    report("waiting")
    gate.open_for_good()
    io.teardown()
    report("end", digest=training.digest())


def newest_loadable(folder: str) -> dict[str, Any] | None:
    """The newest file that ``torch.load`` takes."""
    for path in sorted(_files(folder), key=_step, reverse=True):
        try:
            state: dict[str, Any] = torch.load(path)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            continue
        return state
    return None


def _files(folder: str) -> list[Path]:
    return [path for path in Path(folder).glob("step=*.ckpt") if path.is_file()]


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step="))


def run_trial(
    verdict: Verdict, chance: random.Random, place: Path, *, reference: str, foreign: bytes
) -> None:
    """One trial of ``verdict.kind`` in the new folder ``place``."""
    run = Run(str(place / "checkpoints"), snapshot="blocking", writer="thread")
    trial = Trial(verdict, place / "checkpoints", run, reference=reference, foreign=foreign)
    slow = verdict.kind == "stock: slow disk"
    moment = None if slow else any_moment(chance)
    verdict.details["moment"] = None if moment is None else asdict(moment)
    child = Child(lambda report: train(run, STEPS, report, gate=SlowGate() if slow else None))
    try:
        if trial.follow(child, trial.ledger, moment):
            child.send(signal.SIGKILL)
            trial.drain(child, trial.ledger)
    finally:
        child.close()
    found = newest_loadable(run.folder)
    step = 0 if found is None else found["step"]
    newest = trial.ledger.newest
    verdict.require(step >= newest, "lost", f"reported {newest}, found {step}")
    if trial.ledger.ended:
        _check_kept(trial, STEPS)
    ledger = Ledger()
    child = Child(lambda report: train(run, TOTAL, report))
    try:
        trial.follow(child, ledger)
    finally:
        child.close()
    verdict.require(ledger.digest == trial.reference, "inexact", "the result differs")


def _check_kept(trial: Trial, step: int) -> None:
    names = set(os.listdir(trial.folder)) - trial.foreign.names
    expected = trial.kept.names(step)
    trial.verdict.require(names <= expected, "leak", f"{sorted(names)} instead of {expected}")
