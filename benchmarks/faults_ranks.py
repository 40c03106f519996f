"""One rank of a trial: a training of tests/integrations/, and what befalls it."""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.faults_actions import Armed, armed_strikes
from benchmarks.faults_tests import elastic_jobs, elastic_runs, loop_runs
from benchmarks.faults_trial import EPOCHS, HANG_TIMEOUT_S, PLACES, Setup, Trial
from lightning_dist import CompressedDDPStrategy
from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.reading import load


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
