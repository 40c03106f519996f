"""One rank of a trial: a training of tests/integrations/, and what befalls it."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import elastic_jobs
import elastic_runs
import lightning as L
import loop_runs
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import CompressedDDPStrategy
from lightning_dist.checkpoint.disk.scan import checkpoints, newest_valid
from lightning_dist.checkpoint.reading import load
from tests.campaigns.restart_faults.drawing import (
    EPOCHS,
    HANG_TIMEOUT_S,
    HOOKS,
    PLACES,
    Setup,
    Strike,
    Trial,
)


@dataclass(frozen=True)
class Job:
    """A trial as ``elastic_jobs`` runs it."""

    name: str
    folder: str
    worlds: list[int]
    max_restarts: int
    limit: float
    trial: Trial


def run_job(trial: Trial, folder: Path) -> dict[str, Any]:
    """All starts of a trial; forks, so this process must have no other thread."""
    elastic_jobs.rank_main = rank_main
    folder.mkdir(parents=True)
    job = Job(
        name=f"trial-{trial.number}",
        folder=str(folder),
        worlds=list(trial.worlds),
        max_restarts=trial.max_restarts,
        limit=trial.bound,
        trial=trial,
    )
    return elastic_jobs._in_a_child(job, folder / "results.json")


class Struck(elastic_runs.Net):
    """With a phase that callbacks have no hook for."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.after_step: list[Armed] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for armed in self.after_step:
            armed.meet(self.trainer)


def strategy_of(setup: Setup) -> Any:
    """DDP puts its buckets in another order after the first step of a process.

    Sums of three ranks or more are then taken in another order, and a restart would show in their
    last bits; looking for unused parameters keeps the first order.
    """
    if setup.codec == "ddp":
        return DDPStrategy(find_unused_parameters=setup.world > 2)
    return CompressedDDPStrategy(
        codec=setup.codec, min_compress_numel=0, find_unused_parameters=setup.world > 2
    )


def rank_main(job: Job, start: int) -> None:
    """One rank of one start."""
    elastic_jobs.await_siblings(Path(job.folder))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has its agent's handler; torchrun's not
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    folder, rank = Path(job.folder), int(os.environ["RANK"])
    armed = armed_strikes(job.trial, folder, rank=rank, start=start)
    train = _train_in_loop if job.trial.is_loop else _fit
    result, weights = train(job.trial, folder, armed)
    if rank == 0:
        torch.save(weights, folder / f"weights-{start}.pt")
    (folder / f"end-{start}-{rank}.json").write_text(json.dumps(result))


def _fit(trial: Trial, folder: Path, strikes: list[Armed]) -> tuple[dict[str, Any], Any]:
    """ElasticRestart in a Trainer: elastic_runs.py."""
    setup = trial.setup
    module = Struck(noisy=setup.noisy)
    callbacks: list[L.Callback] = []
    for armed in strikes:
        armed.arm(module, callbacks)
    elastic = {
        "every_n_train_steps": trial.every,
        "keep": trial.keep,
        "batch_policy": trial.policy,
        "format": trial.format,
    }
    if trial.has_stop:
        elastic["hang_timeout"] = HANG_TIMEOUT_S
    data = elastic_runs.Numbered(setup.size, noisy=setup.noisy)
    trainer, module = elastic_runs.fit(
        folder,
        *callbacks,
        loader=lambda: elastic_runs.make_loader(
            data, batch_size=setup.batch, drop_last=setup.drop_last
        ),
        module=module,
        elastic=elastic,
        strategy=strategy_of(setup),
        devices=int(os.environ["WORLD_SIZE"]) if setup.codec == "ddp" else "auto",
        max_epochs=EPOCHS,
        accumulate_grad_batches=setup.accumulate,
    )
    result = {
        "hash": elastic_runs.hash_of(module),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }
    return result, module.state_dict()


def _train_in_loop(trial: Trial, folder: Path, strikes: list[Armed]) -> tuple[dict[str, Any], Any]:
    """ElasticLoop around plain DDP: loop_runs.py."""
    setup = trial.setup
    for armed in strikes:
        if PLACES[armed.strike.phase] == "at_start":
            armed.meet()

    def strike(place: str, steps: int) -> None:
        for armed in strikes:
            if PLACES[armed.strike.phase] == place:
                armed.meet_after(steps)

    elastic: dict[str, Any] = {
        "every_n_steps": trial.every,
        "keep": trial.keep,
        "batch_policy": trial.policy,
        "accumulate": setup.accumulate,
    }
    if trial.has_stop:
        elastic["hang_timeout"] = HANG_TIMEOUT_S
    found, steps = loop_runs.train(
        folder,
        "plain",
        codec=None if setup.codec == "ddp" else setup.codec,
        strike=strike,
        noisy=setup.noisy,
        epochs=EPOCHS,
        size=setup.size,
        loader={"batch_size": setup.batch, "drop_last": setup.drop_last},
        elastic=elastic,
    )
    newest = newest_valid(str(folder / "ckpt"))
    assert newest is not None
    weights = load(newest.path, weights_only=False)["objects"]["model"]
    return {"hash": found, "step": steps, "epoch": EPOCHS}, weights


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
