"""Which run a process is a part of, over all restarts, and what they have cost it."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dist.checkpoint.disk.storage import LocalStorage, storage_of
from lightning_dist.elastic.journal import FINISHED, Journal, Progress, Summary, summarize
from lightning_dist.elastic.layout import Layout
from lightning_dist.elastic.state import ElasticState
from lightning_dist.integrations.elastic_data import ElasticData
from lightning_dist.integrations.elastic_loggers import identify


class RunAccount:
    """What one process knows of the run that it is a part of, and writes down for the next."""

    def __init__(self) -> None:
        self._journal = Journal(None, rank=0)
        self._before: Progress | None = None
        self._to_catch_up: int | None = None
        self._given_seed: int | None = None
        self.run_id = ""
        self.seed = 0
        self.first: Layout | None = None
        """The layout that the run began with, if it began before this process."""

    def identify(self, trainer: pl.Trainer, folder: str) -> None:
        """Let loggers go on where those of the run in ``folder`` were. On rank 0 it reads."""
        if trainer.is_global_zero:
            self._open_journal(trainer, folder)
            self.run_id = self._last_start().get("run_id") or secrets.token_hex(6)
            identify(trainer, run_id=self.run_id)

    def open(self, trainer: pl.Trainer, folder: str, *, seed: int | None) -> None:
        """Agree on which run this is. Collective."""
        self._open_journal(trainer, folder)
        said: tuple[str, int, dict[str, Any] | None] = (self.run_id, 0, None)
        if trainer.is_global_zero:
            start = self._last_start()
            self._before = self._journal.last_progress()
            run_id = self.run_id or start.get("run_id") or secrets.token_hex(6)
            begun = None if self._before is None else start.get("first")  # if it did any step
            said = run_id, _seed(seed, start.get("seed")), begun
        self.run_id, self.seed, first = trainer.strategy.broadcast(said)
        self.first = None if first is None else Layout(**first)
        self._given_seed = seed
        self._require_shared(trainer, folder)

    def _require_shared(self, trainer: pl.Trainer, folder: str) -> None:
        """Find out now, and not when another host has to go on, that it could not."""
        if not self._journal.is_kept:
            return
        strategy: Any = trainer.strategy
        name = strategy.broadcast(self._journal.leave_token() if trainer.is_global_zero else "")
        sees = not name or self._journal.has_token(name)
        if not strategy.reduce_boolean_decision(sees, all=True):
            raise ValueError(
                f"some ranks do not see rank 0's {folder}, so they could not go on from its "
                "checkpoints; put it on a filesystem that all hosts mount, or in an object store"
            )

    def _open_journal(self, trainer: pl.Trainer, folder: str) -> None:
        storage, inside = storage_of(folder)
        local = inside if isinstance(storage, LocalStorage) else None
        self._journal = Journal(local, rank=trainer.global_rank)

    def _last_start(self) -> dict[str, Any]:
        starts = [each for each in self._journal.read() if each["event"] == "start"]
        return starts[-1] if starts else {}

    def resume(self, state: ElasticState | None, *, is_own: bool) -> None:
        """Be the run that a checkpoint belongs to.

        Args:
            is_own: it was in the folder of this run; or else another run begins with it.

        Raises:
            ValueError: the checkpoint's order of samples has another seed than the user wants.
        """
        if state is None:
            return
        if self._given_seed not in (None, state.seed):
            raise ValueError(
                f"seed={self._given_seed} could not take effect: the epochs of the checkpoint are "
                f"in the order of seed {state.seed}; give that one, or none"
            )
        self.seed = state.seed
        if is_own:
            self.run_id = state.run_id

    def begin(self, trainer: pl.Trainer, state: ElasticState | None, data: ElasticData) -> None:
        """Say where training goes on."""
        rank_zero_info(_line(trainer, state, data))
        if not trainer.is_global_zero:
            return
        samples = 0 if state is None else state.total_samples
        before = self._before
        redone = None if before is None else max(before.samples - samples, 0)
        self._to_catch_up = None if before is None else before.samples
        self._journal.write(
            "start",
            run_id=self.run_id,
            seed=self.seed,
            first=asdict(data.layouts()[0]),
            world_size=trainer.world_size,
            samples=samples,
            redone=redone,
        )

    def stepped(self, trainer: pl.Trainer, samples: int) -> None:
        """An optimizer step is done, of all ranks; ``samples`` so far."""
        if not trainer.is_global_zero:
            return
        if self._to_catch_up is not None and samples > self._to_catch_up:
            assert self._before is not None
            seconds = time.time() - self._before.time
            self._to_catch_up = None
            self._journal.write("caught_up", run_id=self.run_id, seconds=seconds)
            self._log(trainer)
        if self._to_catch_up is None:  # or else a second fault would hide what the first one cost
            self._journal.progress(samples)

    @property
    def summary(self) -> Summary:
        """What restarts have cost this run so far; on rank 0."""
        return summarize(self._journal.read(), run_id=self.run_id)

    def _log(self, trainer: pl.Trainer) -> None:
        summary = self.summary
        metrics = {
            "elastic/restarts": float(summary.restarts),
            "elastic/seconds_lost": summary.seconds_lost,
            "elastic/samples_redone": float(summary.samples_redone),
            "elastic/world_size": float(trainer.world_size),
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=max(trainer.global_step - 1, 0))

    def finish(self, trainer: pl.Trainer) -> None:
        """The training has ended as it should."""
        self.end(FINISHED)
        if not trainer.is_global_zero:
            return
        summary = self.summary
        if summary.restarts:
            self._log(trainer)
            restarts, causes = _counted(summary.restarts, "restart"), "; ".join(summary.causes)
            rank_zero_info(
                f"elastic: {restarts}, {summary.seconds_lost:.1f} s lost, "
                f"{summary.samples_redone} samples redone ({causes})"
            )

    def end(self, reason: str, *, is_echo: bool = False) -> None:
        """This process ends; ``is_echo``: because another one did."""
        self._journal.write("end", reason=reason, kind="echo" if is_echo else "own")

    def close(self) -> None:
        """The fit is over."""
        self._journal.close()
        self._before = self._to_catch_up = None


def _seed(given: int | None, before: int | None) -> int:
    if given is not None:
        return given
    if before is not None:
        return before
    everywhere = os.environ.get("PL_GLOBAL_SEED")  # of seed_everything
    return secrets.randbits(32) if everywhere is None else int(everywhere)


def _line(trainer: pl.Trainer, state: ElasticState | None, data: ElasticData) -> str:
    now: Layout | None = data.layout
    if state is None:
        start = f"elastic: world {trainer.world_size}, fresh start"
    else:
        start = (
            f"elastic: world {state.layout.world_size} -> {trainer.world_size}, resumed at sample "
            f"{state.total_samples:,} (epoch {state.position.epoch}, step {state.total_steps})"
        )
    if now is None:
        return start
    rest = now.global_batch % (now.world_size * now.accumulate)
    uneven = ", not all of them equal" if rest else ""
    passes, ranks = _counted(now.accumulate, "pass"), _counted(now.world_size, "rank")
    return f"{start}; global batch {now.global_batch}: {passes} on {ranks}{uneven}"


def _counted(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural}"
