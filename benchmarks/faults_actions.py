"""What befalls a rank, and where."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.faults_tests import elastic_jobs
from benchmarks.faults_trial import HOOKS, Strike, Trial
from lightning_dist.checkpoint.disk.scan import checkpoints

_LEFT = 48 << 20


def run_out_of_memory() -> None:
    """Allocate until the allocator raises, with a limit on this process (RLIMIT_AS)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _LEFT
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hoard = []
    while True:
        hoard.append(torch.ones(1 << 20))


def make_mistake() -> None:
    """What a user's code does."""
    raise RuntimeError("a mistake of the user's")


ACTIONS: dict[str, Callable[[], None]] = {
    **elastic_jobs.KINDS,
    "raise": make_mistake,
    "oom": run_out_of_memory,
}


class Armed:
    """A strike on this rank, which counts how often its phase is met."""

    def __init__(self, strike: Strike, marker: Path, act: Callable[[], None]) -> None:
        self.strike, self.marker, self.act = strike, marker, act
        self.met = 0

    def meet(self, trainer: L.Trainer | None = None) -> None:
        if trainer is None or not trainer.sanity_checking:
            self.meet_after(self.strike.step if trainer is None else trainer.global_step)

    def meet_after(self, steps: int) -> None:
        """The phase is met after so many optimizer steps."""
        if steps < self.strike.step:
            return
        self.met += 1
        if self.met <= self.strike.skip:
            return
        try:
            marker = os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(marker, repr(time.time()).encode())
        os.close(marker)
        self.act()

    def arm(self, module: Any, callbacks: list[L.Callback]) -> None:
        """Put it where its phase is."""
        hook = HOOKS[self.strike.phase]
        if hook == "at_start":
            self.meet()
        elif hook == "fsync":
            callbacks.append(_WhileWriting(self))
        elif hook == "after_optimizer_step":
            module.after_step.append(self)
        else:
            callback = L.Callback()
            setattr(callback, hook, lambda trainer, *_, **__: self.meet(trainer))
            callbacks.append(callback)


class _WhileWriting(L.Callback):
    """Meets a strike in every fsync of this process, once it trains: those are of checkpoints."""

    def __init__(self, armed: Armed) -> None:
        self.armed = armed

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.on_train_batch_end = lambda *_, **__: None
        usual = os.fsync
        os.fsync = lambda file: (self.armed.meet(trainer), usual(file))[1]


def damage(folder: Path, chance: random.Random, *, how: str, count: int) -> None:
    """Damage the newest checkpoints, and leave one whole at least."""
    whole = [each for each in checkpoints(str(folder)) if each.description is not None]
    for each in whole[: min(count, len(whole) - 1)]:
        path = Path(each.path)
        if path.is_dir():
            path = chance.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        content = bytearray(path.read_bytes())
        at = chance.randrange(len(content))
        if how == "flip":
            content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content if how == "flip" else content[:at])


def armed_strikes(trial: Trial, folder: Path, *, rank: int, start: int) -> list[Armed]:
    """Those that can happen in this process."""
    armed = []
    for number, strike in enumerate(trial.strikes):
        if rank not in strike.ranks or strike.start != start:
            continue
        if strike.after is not None and not list(folder.glob(f"fired-{strike.after}-*")):
            continue
        act = ACTIONS.get(strike.action) or partial(
            damage,
            folder / "ckpt",
            random.Random(trial.number),
            how=strike.action,
            count=strike.count,
        )
        armed.append(Armed(strike, folder / f"fired-{number}-{rank}", act))
    return armed
