"""The life of a run over its restarts: identity, notices, bounds on hanging, and the account."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.checkpoint.disk.storage import LocalStorage, storage_of
from lightning_dist.elastic.journal import FINISHED, Journal, Progress, Summary, summarize
from lightning_dist.elastic.launch import Launch
from lightning_dist.elastic.layout import Layout
from lightning_dist.elastic.notice import Notices
from lightning_dist.elastic.settings import EndSettings
from lightning_dist.elastic.state import ElasticState
from lightning_dist.elastic.watchdog import Watchdog
from lightning_dist.integrations.elastic_data import ElasticData
from lightning_dist.integrations.elastic_loggers import identify
from lightning_dist.integrations.elastic_signals import (
    EXIT_RESTART,
    Preempted,
    notice_signals,
    requeue,
)

_LAST_SECONDS = 20.0
"""How long a process may take to end when its peers are gone, or all is saved."""


class RunLife:
    """What one process knows of the run that it is a part of.

    Args:
        settings: when it ends by itself.
    """

    def __init__(self, settings: EndSettings) -> None:
        self._settings = settings
        self._journal = Journal(None, rank=0)
        self._notices: Notices | None = None
        self._watchdog: Watchdog | None = None
        self._before: Progress | None = None
        self._to_catch_up: int | None = None
        self._given_seed: int | None = None
        self.run_id = ""
        self.seed = 0
        self.first: Layout | None = None
        """The layout that the run began with, if it began before this process."""

    @property
    def reason(self) -> str:
        """Why this process has been told to end; empty if it has not."""
        return "" if self._notices is None else self._notices.reason

    @property
    def is_told(self) -> bool:
        """Whether this process has been told to end."""
        return bool(self.reason)

    def identify(self, trainer: pl.Trainer, folder: str) -> None:
        """Let loggers go on where those of the run in ``folder`` were. On rank 0 it reads."""
        if trainer.is_global_zero:
            self._open_journal(trainer, folder)
            self.run_id = self._last_start().get("run_id") or secrets.token_hex(6)
            identify(trainer, run_id=self.run_id)

    def open(self, trainer: pl.Trainer, folder: str, *, seed: int | None) -> None:
        """Agree on who this is, and begin to watch for progress. Collective."""
        self._watchdog = Watchdog(self._settings.hang_timeout, last_words=self._last_words)
        self._watchdog.start()
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
        self.beat()
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

    def listen(self, trainer: pl.Trainer) -> None:
        """Begin to note signals."""
        self.beat()
        environment = trainer._accelerator_connector.cluster_environment
        launcher: Any = trainer.strategy.launcher
        watchdog = self._watchdog

        def on_notice(reason: str) -> None:
            assert watchdog is not None
            watchdog.end_within(
                self._settings.grace_period, f"{reason}, and the grace period is over"
            )
            if hasattr(launcher, "procs"):  # Lightning started the other ranks of this host
                for process in launcher.procs:
                    process.terminate()

        self._notices = Notices(
            notice_signals(environment),
            preempted=self._settings.preempted if trainer.local_rank == 0 else None,
            poll_s=self._settings.poll_s,
            on_notice=on_notice,
        )
        self._notices.start()

    def begin(self, trainer: pl.Trainer, state: ElasticState | None, data: ElasticData) -> None:
        """Say where training goes on."""
        self.beat()
        rank_zero_info(_line(trainer, state, data))
        if not trainer.is_global_zero:
            return
        for missing in Launch.from_env().missing_settings():
            rank_zero_warn(missing)
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

    def beat(self) -> None:
        """A batch is done."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def rest(self) -> None:
        """No batch is to be expected any more."""
        if self._watchdog is not None:
            self._watchdog.rest()

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
        self.rest()
        self._journal.write("end", reason=FINISHED)
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

    def preempted(self, trainer: pl.Trainer, reasons: list[str]) -> Preempted:
        """All ranks have saved: how this process ends.

        Args:
            reasons: why each rank was told to end, if it was.
        """
        told = self.reason
        self._journal.write("end", reason=told or "told by others", kind="" if told else "echo")
        launch = Launch.from_env()
        code = EXIT_RESTART if launch.is_elastic and not told else 0
        if trainer.is_global_zero:
            requeue(trainer._accelerator_connector.cluster_environment, reasons)
        why = ", ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
        rank_zero_info(
            f"elastic: stopped at step {trainer.global_step} ({why}), everything is saved"
        )
        if launch.is_elastic:
            self._be_gone_soon("after the last checkpoint")
        elif self._watchdog is not None:
            self._watchdog.stop()
        return Preempted(code)

    def fail(self, exception: BaseException) -> None:
        """The training ends with an exception; others may have had it first."""
        if isinstance(exception, SIGTERMException):
            self._end_listening()
            return
        text = str(exception).strip().split("\n")[0][:200]
        is_echo = _is_of_a_peer(exception)
        kind = "echo" if is_echo else "own"
        self._journal.write("end", reason=f"{type(exception).__name__}: {text}", kind=kind)
        if is_echo and Launch.from_env().is_elastic:
            self.rest()
            self._be_gone_soon(f"after {type(exception).__name__}")
        else:
            self.close()

    def _be_gone_soon(self, why: str) -> None:
        """Leaving a group whose ranks are gone may hang, and the launcher waits for the exit."""
        if self._watchdog is not None:
            self._watchdog.end_within(_LAST_SECONDS, f"still there {_LAST_SECONDS:g} s {why}")

    def _last_words(self, why: str) -> None:
        kind = "own" if why.startswith("no progress") else "echo"
        self._journal.write("end", reason=why, kind=kind)

    def _end_listening(self) -> None:
        if self._notices is not None:
            self._notices.stop()
            self._notices = None

    def close(self) -> None:
        """The fit is over."""
        self._end_listening()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        self._journal.close()
        self._before = self._to_catch_up = None


def _seed(given: int | None, before: int | None) -> int:
    if given is not None:
        return given
    if before is not None:
        return before
    everywhere = os.environ.get("PL_GLOBAL_SEED")  # of seed_everything
    return secrets.randbits(32) if everywhere is None else int(everywhere)


def _is_of_a_peer(exception: BaseException) -> bool:
    """Whether an exception says that another rank is gone; torch's are all RuntimeErrors."""
    text = str(exception).lower()
    signs = ("gloo", "nccl", "processgroup", "connection closed", "connection reset")
    return isinstance(exception, RuntimeError) and any(sign in text for sign in signs)


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
