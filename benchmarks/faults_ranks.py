"""One rank of a trial: tests/integrations/elastic_runs.py's training, and what befalls it."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.faults_trial import EPOCHS, HANG_TIMEOUT_S, HOOKS, Setup, Strike, Trial
from lightning_dist import CompressedDDPStrategy, ElasticRestart
from lightning_dist.checkpoint.disk.scan import checkpoints

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "integrations")]

import elastic_jobs  # noqa: E402
import elastic_runs  # noqa: E402
from elastic_runs import Net, Numbered, fit, hash_of, make_loader  # noqa: E402

_LEFT = 48 << 20


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
    elastic_jobs.rank_main, elastic_runs.Account = rank_main, Counted
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
        if trainer is not None and (
            trainer.sanity_checking or trainer.global_step < self.strike.step
        ):
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
            usual = os.fsync
            os.fsync = lambda file: (self.meet(), usual(file))[1]  # type: ignore[assignment]
        elif hook == "after_optimizer_step":
            module.after_step.append(self)
        else:
            callback = L.Callback()
            setattr(callback, hook, lambda trainer, *_, **__: self.meet(trainer))
            callbacks.append(callback)


class Struck(Net):
    """With a phase that callbacks have no hook for."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.after_step: list[Armed] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for armed in self.after_step:
            armed.meet(self.trainer)


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


def armed_strikes(job: Job, rank: int, start: int) -> list[Armed]:
    """Those that can happen in this process."""
    folder, armed = Path(job.folder), []
    for number, strike in enumerate(job.trial.strikes):
        if rank not in strike.ranks or strike.start != start:
            continue
        if strike.after is not None and not list(folder.glob(f"fired-{strike.after}-*")):
            continue
        act = ACTIONS.get(strike.action) or partial(
            damage,
            folder / "ckpt",
            random.Random(job.trial.number),
            how=strike.action,
            count=strike.count,
        )
        armed.append(Armed(strike, folder / f"fired-{number}-{rank}", act))
    return armed


class Counted(elastic_runs.Account):
    """Takes the samples of a pass when it is over: before, ``this_pass`` is still the last one."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        restart = next(c for c in trainer.callbacks if isinstance(c, ElasticRestart))
        if restart.this_pass is None or restart.this_pass.weight:
            self.ids += batch[0].tolist()
        super().on_train_batch_end(trainer, module, outputs, batch, *rest)


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
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    trial, setup = job.trial, job.trial.setup
    folder, rank = Path(job.folder), int(os.environ["RANK"])
    module = Struck(noisy=setup.noisy)
    callbacks: list[L.Callback] = []
    for armed in armed_strikes(job, rank, start):
        armed.arm(module, callbacks)
    elastic = {
        "every_n_train_steps": trial.every,
        "keep": trial.keep,
        "batch_policy": trial.policy,
        "format": trial.format,
    }
    if trial.has_stop:
        elastic["hang_timeout"] = HANG_TIMEOUT_S
    data = Numbered(setup.size, noisy=setup.noisy)
    trainer, module = fit(
        folder,
        *callbacks,
        loader=lambda: make_loader(data, drop_last=setup.drop_last),
        module=module,
        elastic=elastic,
        strategy=strategy_of(setup),
        devices=int(os.environ["WORLD_SIZE"]) if setup.codec == "ddp" else "auto",
        max_epochs=EPOCHS,
        accumulate_grad_batches=setup.accumulate,
    )
    if rank == 0:
        torch.save(module.state_dict(), folder / f"weights-{start}.pt")
    result = {"hash": hash_of(module), "step": trainer.global_step, "epoch": trainer.current_epoch}
    (folder / f"end-{start}-{rank}.json").write_text(json.dumps(result))
