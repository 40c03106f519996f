"""The trainer of the crash campaign: a small real training whose result is known to the bit."""

import functools
import hashlib
import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.disk.scan import checkpoints, newest_valid
from lightning_dist.checkpoint.reading import load
from lightning_dist.settings.run import CheckpointSettings
from tests.campaigns.checkpoint_crash.child import BOUND_S, Report

STEPS = 24
"""of the run that is killed."""
TOTAL = 30
"""of the run after it; both together are compared with an uninterrupted one."""
EVERY = 3
LAST = "last.ckpt"

_WIDTH = 128
_BATCH = 16


@dataclass(frozen=True)
class Run:
    """How a trainer saves.

    ``same_name``: every save replaces the one before; otherwise they have names of their own, and
    each is removed when the next was saved, as ``save_top_k=1`` does. ``last``: a link of that name
    shows the newest. ``touched``: the step at which parameters are written to, with the values that
    they have, just after the save; where that is noticed the snapshot is dropped. ``stock``: with
    Lightning's own AsyncCheckpointIO, as ModelCheckpoint does.
    """

    folder: str
    snapshot: str = "overlap"
    writer: str = "process"
    sharded: bool = False
    same_name: bool = False
    last: bool = False
    max_in_flight: int = 1
    touched: int = 0
    stock: bool = False

    def target(self, step: int) -> str:
        return f"{self.folder}/{'model' if self.same_name else f'step={step}'}.ckpt"

    def names(self, step: int) -> set[str]:
        """What is in the folder when ``step`` was the last to be saved."""
        return {os.path.basename(self.target(step))} | ({LAST} if self.last else set())


class Training:
    """A perceptron with dropout, Adam, and batches from torch's random state."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.step = 0
        self._model = nn.Sequential(
            nn.Linear(_WIDTH, _WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(_WIDTH, 1)
        )
        self.optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)

    def advance(self) -> None:
        inputs = torch.randn(_BATCH, _WIDTH)
        self.optimizer.zero_grad()
        (self._model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def touch(self) -> None:
        for parameter in self._model.parameters():
            parameter.mul_(1)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self._model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])

    def digest(self) -> str:
        """Of parameters, moments and random state."""
        found = hashlib.sha256()
        for value in tree_leaves((self._model.state_dict(), self.optimizer.state_dict())):
            if isinstance(value, torch.Tensor):
                found.update(value.numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


@functools.cache
def reference() -> str:
    """The digest of an uninterrupted run."""
    training = Training()
    while training.step < TOTAL:
        training.advance()
    return training.digest()


class Gate:
    """A slow disk: it lets one write through whenever the next save is about to be asked for."""

    def __init__(self, *, slow: bool) -> None:
        self._tickets = threading.Semaphore(0)
        self._open = not slow

    def open(self) -> None:
        self._tickets.release()

    def open_for_good(self) -> None:
        """There will be no next save."""
        self._open = True
        self._tickets.release()

    def pass_through(self) -> None:
        if not self._open:
            self._tickets.acquire()


class StockSaver:
    """AsyncCheckpointIO with the methods of a Checkpointer; reports when a file is complete."""

    def __init__(self, report: Report, gate: Gate) -> None:
        class Reporting(TorchCheckpointIO):
            def save_checkpoint(self, checkpoint: Any, path: Any, *_: Any, **__: Any) -> None:
                gate.pass_through()
                super().save_checkpoint(checkpoint, path)
                report("committed", step=checkpoint["step"], target=str(path))

        self._io = AsyncCheckpointIO(Reporting())
        # At once, as ModelCheckpoint of lightning 2.6.6 does.
        self.remove = self._io.remove_checkpoint

    def open(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)

    def watch(self, optimizers: Any) -> None:
        """It copies before it returns."""

    def save(self, state: Any, target: str, *, step: int, sharded: bool) -> None:
        self._io.save_checkpoint(state, target)

    def poll(self) -> list[Any]:
        return []

    def wait(self, timeout: float) -> None:
        self._io.teardown()

    def close(self, timeout: float) -> None:
        """Nothing is left."""


class Trainer:
    """Trains, saves every few steps, and reports everything."""

    def __init__(self, run: Run, report: Report, *, gate: Gate | None = None) -> None:
        self._run, self._report, self._gate = run, report, gate or Gate(slow=False)
        self._training = Training()
        self._superseded: list[str] = []
        self._saver: Any = (
            StockSaver(report, self._gate)
            if run.stock
            else Checkpointer(
                CheckpointSettings(
                    snapshot=run.snapshot,
                    writer=run.writer,
                    max_in_flight=run.max_in_flight,
                    on_error="warn",
                )
            )
        )

    def run(self, steps: int) -> None:
        """Go on from the newest checkpoint, or begin, and train up to ``steps``."""
        self._resume()
        while self._training.step < steps:
            self._training.advance()
            self._report("step", step=self._training.step)
            if self._training.step % EVERY == 0:
                self._save()
            self._poll()
        self._report("waiting")
        self._gate.open_for_good()
        try:
            self._saver.wait(BOUND_S / 2)
            self._poll()
            self._saver.close(BOUND_S / 2)
        except (CheckpointError, TimeoutError) as error:
            self._report("hang", reason=str(error))
        self._report("end", digest=self._training.digest(), superseded=self._superseded)

    def _resume(self) -> None:
        began = time.monotonic()
        self._saver.open(self._run.folder)
        opened = time.monotonic() - began
        state, self._superseded = (newest_stock if self._run.stock else newest)(self._run.folder)
        if state is not None:
            self._training.restore(state)
        self._saver.watch([self._training.optimizer])
        self._report(
            "opened", step=self._training.step, seconds=opened, torn=torn(self._run.folder)
        )

    def _save(self) -> None:
        step = self._training.step
        target = self._run.target(step)
        self._report("requested", step=step)
        self._gate.open()
        self._saver.save(self._training.state(), target, step=step, sharded=self._run.sharded)
        if step == self._run.touched:
            self._training.touch()
        if self._run.last:
            self._saver.link(target, f"{self._run.folder}/{LAST}", symbolic=True)
        for path in self._superseded:
            if path != target:
                self._saver.remove(path)
        self._superseded = [target]
        self._report("saved", step=step)

    def _poll(self) -> None:
        for event in self._saver.poll():
            if isinstance(event, Committed):
                self._report("committed", step=event.origin.step, target=event.target)
            elif isinstance(event, Failed):
                step = None if event.origin is None else event.origin.step
                self._report("failed", step=step, target=event.target, reason=event.reason)
                if step is None and os.path.basename(event.target) != LAST:
                    self._superseded.append(event.target)  # could not be removed


State = dict[str, Any]


def newest(folder: str) -> tuple[State | None, list[str]]:
    """The newest state, and all that the next save supersedes."""
    found = newest_valid(folder)
    ours = [
        there.path
        for there in checkpoints(folder)
        if there.description is not None
        and there.description.origin is not None
        and os.path.basename(there.path) != LAST
    ]
    return None if found is None else load(found.path), ours


def newest_stock(folder: str) -> tuple[State | None, list[str]]:
    """The same of files of torch.save: the newest state that ``torch.load`` takes."""
    files = sorted(
        (path for path in Path(folder).glob("step=*.ckpt") if path.is_file()),
        key=lambda path: int(path.stem.removeprefix("step=")),
    )
    for path in reversed(files):
        try:
            return torch.load(path), [str(file) for file in files]
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            continue
    return None, [str(file) for file in files]


def torn(folder: str) -> list[str]:
    """What is wrong with things in ``folder`` that look like checkpoints."""
    return [there.problem for there in checkpoints(folder) if there.description is None]
