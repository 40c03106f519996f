"""The trainer of the crash campaign: a small real training whose result is known to the bit."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.disk.scan import checkpoints, newest_valid
from lightning_dist.checkpoint.reading import load
from lightning_dist.checkpoint.settings import CheckpointSettings

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
    they have, just after the save; where that is noticed the snapshot is dropped.
    """

    folder: str
    snapshot: str = "overlap"
    writer: str = "process"
    sharded: bool = False
    same_name: bool = False
    last: bool = False
    max_in_flight: int = 1
    touched: int = 0

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
        for tensor in (*_tensors(self._model.state_dict()), *_tensors(self.optimizer.state_dict())):
            found.update(tensor.numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


def reference() -> str:
    """The digest of an uninterrupted run."""
    training = Training()
    while training.step < TOTAL:
        training.advance()
    return training.digest()


class Gate:
    """Lets a slow disk go on; nothing holds it up here."""

    def open(self) -> None:
        """The next save is about to be asked for."""

    def open_for_good(self) -> None:
        """There will be no next save."""


class Trainer:
    """Trains, saves every few steps, and reports everything."""

    def __init__(self, run: Run, report: Report, *, gate: Gate | None = None) -> None:
        self._run, self._report, self._gate = run, report, gate or Gate()
        self._training = Training()
        self._superseded: list[str] = []
        self._checkpointer = Checkpointer(
            CheckpointSettings(
                snapshot=run.snapshot,
                writer=run.writer,
                max_in_flight=run.max_in_flight,
                on_error="warn",
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
            self._checkpointer.wait(BOUND_S / 2)
            self._poll()
            self._checkpointer.close(BOUND_S / 2)
        except (CheckpointError, TimeoutError) as error:
            self._report("hang", reason=str(error))
        self._report("end", digest=self._training.digest(), superseded=self._superseded)

    def _resume(self) -> None:
        began = time.monotonic()
        self._checkpointer.open(self._run.folder)
        opened = time.monotonic() - began
        found = newest_valid(self._run.folder)
        if found is not None:
            self._training.restore(load(found.path))
        self._superseded = [
            there.path
            for there in checkpoints(self._run.folder)
            if there.description is not None
            and there.description.origin is not None
            and os.path.basename(there.path) != LAST
        ]
        self._checkpointer.watch([self._training.optimizer])
        self._report(
            "opened", step=self._training.step, seconds=opened, torn=torn(self._run.folder)
        )

    def _save(self) -> None:
        step = self._training.step
        target = self._run.target(step)
        self._report("requested", step=step)
        self._gate.open()
        self._checkpointer.save(
            self._training.state(), target, step=step, sharded=self._run.sharded
        )
        if step == self._run.touched:
            self._training.touch()
        if self._run.last:
            self._checkpointer.link(target, f"{self._run.folder}/{LAST}", symbolic=True)
        for path in self._superseded:
            if path != target:
                self._checkpointer.remove(path)
        self._superseded = [target]
        self._report("saved", step=step)

    def _poll(self) -> None:
        for event in self._checkpointer.poll():
            if isinstance(event, Committed):
                self._report("committed", step=event.origin.step, target=event.target)
            elif isinstance(event, Failed):
                step = None if event.origin is None else event.origin.step
                self._report("failed", step=step, target=event.target, reason=event.reason)
                if step is None and os.path.basename(event.target) != LAST:
                    self._superseded.append(event.target)  # could not be removed


def torn(folder: str) -> list[str]:
    """What is wrong with things in ``folder`` that look like checkpoints."""
    return [there.problem for there in checkpoints(folder) if there.description is None]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in _tensors(inner)]
    return []


BOUND_S = 30.0
"""Nothing in a trial takes longer; what does counts as a hang."""

Message = dict[str, Any]
Report = Callable[..., None]

_write = os.write  # trials replace os.write by one that fails


class Hang(RuntimeError):
    """Something waited longer than it may."""


class Child:
    """A fork of this process that runs ``run(report)`` in a session of its own, and ends.

    The caller has no threads but this one, so that the fork is whole.
    """

    def __init__(self, run: Callable[[Report], None]) -> None:
        self._pipe, theirs = os.pipe()
        self._buffer = b""
        self.ended = False
        self.pid = os.fork()
        if self.pid == 0:
            _serve(run, theirs)
        os.close(theirs)
        self._reaped = False

    def receive(self, timeout: float) -> Message | None:
        """The next message; None after ``timeout`` seconds, and when ``ended``."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._pipe, 1 << 16)
            if not data:
                self.ended = True
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def send(self, number: signal.Signals) -> None:
        if not self._reaped:
            os.kill(self.pid, number)

    def children(self) -> list[int]:
        """Processes that it has started and that are still its own."""
        lists = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(pid) for found in lists for pid in _text(found).split()]

    def close(self) -> None:
        """Kill it, if it still runs, and reap it."""
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._pipe)
            self._reaped = True


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended in between
        return ""


def _serve(run: Callable[[Report], None], pipe: int) -> None:
    def report(event: str, **fields: Any) -> None:
        _write(pipe, json.dumps({"event": event, **fields}).encode() + b"\n")

    try:
        os.setsid()
        run(report)
    except BaseException:
        report("error", reason=traceback.format_exc()[-3000:])
    finally:
        os._exit(0)
