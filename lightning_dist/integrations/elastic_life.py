"""How a process of a run ends: notices, bounds on hanging, and what is said of it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.elastic.launch import Launch
from lightning_dist.elastic.notice import Notices
from lightning_dist.elastic.settings import EndSettings
from lightning_dist.elastic.watchdog import Watchdog
from lightning_dist.integrations.elastic_account import RunAccount
from lightning_dist.integrations.elastic_signals import (
    EXIT_RESTART,
    Preempted,
    notice_signals,
    requeue,
)

_LAST_SECONDS = 20.0
"""How long a process may take to end when its peers are gone, or all is saved."""


class RunLife:
    """The life of one process, from the set-up of a fit to its end.

    Args:
        settings: when it ends by itself.
        account: takes note of why.
    """

    def __init__(self, settings: EndSettings, account: RunAccount) -> None:
        self._settings = settings
        self._account = account
        self._notices: Notices | None = None
        self._watchdog: Watchdog | None = None

    @property
    def reason(self) -> str:
        """Why this process has been told to end; empty if it has not."""
        return "" if self._notices is None else self._notices.reason

    @property
    def is_told(self) -> bool:
        """Whether this process has been told to end."""
        return bool(self.reason)

    def open(self) -> None:
        """Begin to watch for progress."""
        self._watchdog = Watchdog(self._settings.hang_timeout, last_words=self._last_words)
        self._watchdog.start()

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

    def begin(self) -> None:
        """Training begins."""
        self.beat()
        for missing in Launch.from_env().missing_settings():
            rank_zero_warn(missing)

    def beat(self) -> None:
        """A batch, or a stage of the start, is done."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def finish(self) -> None:
        """The training has ended as it should: no batch is to be expected any more."""
        if self._watchdog is not None:
            self._watchdog.rest()

    def preempted(self, trainer: pl.Trainer, reasons: list[str]) -> Preempted:
        """All ranks have saved: how this process ends.

        Args:
            reasons: why each rank was told to end, if it was.
        """
        told = self.reason
        self._account.end(told or "told by others", is_echo=not told)
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
        self._account.end(f"{type(exception).__name__}: {text}", is_echo=is_echo)
        if is_echo and Launch.from_env().is_elastic:
            self.finish()
            self._be_gone_soon(f"after {type(exception).__name__}")
        else:
            self.close()

    def _be_gone_soon(self, why: str) -> None:
        """Leaving a group whose ranks are gone may hang, and the launcher waits for the exit."""
        if self._watchdog is not None:
            self._watchdog.end_within(_LAST_SECONDS, f"still there {_LAST_SECONDS:g} s {why}")

    def _last_words(self, why: str) -> None:
        self._account.end(why, is_echo=not why.startswith("no progress"))

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
        self._account.close()


def _is_of_a_peer(exception: BaseException) -> bool:
    """Whether an exception says that another rank is gone; torch's are all RuntimeErrors."""
    text = str(exception).lower()
    signs = (
        *("gloo", "nccl", "processgroup", "connection closed", "connection reset"),
        "killed by signal: terminated",  # a worker of a loader, by the launcher
    )
    return isinstance(exception, RuntimeError) and any(sign in text for sign in signs)
