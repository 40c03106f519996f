"""End of a process: preemption, bounds on hanging, and messages."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence

from lightning_dist.elastic.history import RunHistory
from lightning_dist.elastic.process.preemption import PREEMPTED, PreemptionListener
from lightning_dist.elastic.process.watchdog import Watchdog
from lightning_dist.ranks.launch import Launch
from lightning_dist.settings.run import RunSettings

EXIT_UNSAVED = 74
"""Exit code (EX_IOERR) of a rank that stopped at a step whose checkpoint could not be written."""

EXIT_RESTART = 75
"""Exit code (EX_TEMPFAIL) of a rank that stopped because another one had to: start it again.

No failure under ``lightning-dist launch``; torchrun itself takes one of its ``max_restarts``.
"""

EXIT_LEAVE = 77
"""Exit code of a rank that stopped because its machine is about to go: start nothing there."""

EXIT_EVICTED = 78
"""Exit code of a worker that finds a generation without itself: start another one in its place."""

_LAST_SECONDS = 20.0
"""Seconds for a process to end when its peers have ended, or all is saved."""
_ROUND = 10.0
_ORPHANED = "the launcher of this process has terminated"


class ProcessLifecycle:
    """The life of one process, from its set-up to its end.

    Args:
        settings: when it ends by itself.
        history: takes note of why.
    """

    def __init__(self, settings: RunSettings, history: RunHistory) -> None:
        self._settings = settings
        self._history = history
        self._notices: PreemptionListener | None = None
        self._watchdog: Watchdog | None = None
        self.waits_for_another: Callable[[], bool] = lambda: False
        """Asked where there is no progress: whether another rank is the one that hangs."""
        self.lapsed: Callable[[], str] | None = None
        """Asked again and again until the training has ended: why others may write by now. None
        where members do not change within the process."""

    @property
    def reason(self) -> str:
        """Reason of the preemption of this process; empty if there is none."""
        return "" if self._notices is None else self._notices.reason

    @property
    def stop_requested(self) -> bool:
        """Whether a stop of this process was requested."""
        return bool(self.reason)

    @property
    def round_s(self) -> float:
        """Seconds that a rank may wait for something before it has to show that it answers."""
        limit = self._settings.hang_timeout
        return _ROUND if limit is None else min(_ROUND, limit / 4)

    def open(self) -> None:
        """Begin to watch for progress; again, where the members changed before all was there."""
        if self._watchdog is not None:
            self._watchdog.stop()
        self._watchdog = Watchdog(
            self._settings.hang_timeout,
            last_words=self._last_words,
            waits=lambda: self.waits_for_another(),
            lapsed=lambda: (self.lapsed or str)(),  # read once: another thread may end it
            orphaned=self._orphaned,
        )
        self._watchdog.start()

    def note(
        self,
        signals: Iterable[signal.Signals],
        *,
        asks: bool,
        on_notice: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to note signals.

        Args:
            asks: whether this process asks ``preemption_check``; one of a node does.
            on_notice: called from a thread at the first notice.
        """
        self.heartbeat()
        watchdog = self._watchdog

        def noticed(reason: str) -> None:
            assert watchdog is not None
            watchdog.end_within(
                self._settings.grace_period, f"{reason}, and the grace period is over"
            )
            on_notice()

        self._notices = PreemptionListener(
            signals,
            check=self._settings.preemption_check if asks else None,
            poll_interval=self._settings.preemption_poll_interval,
            on_notice=noticed,
        )
        self._notices.start()

    def _orphaned(self) -> None:
        """Nobody would end this process, and another launcher's would find it in its folder."""
        if self.recovers:  # the members of the job decide who goes on
            return
        if self._notices is not None:
            self._notices.give(_ORPHANED)
        elif self._watchdog is not None:
            self._watchdog.end_within(0.0, _ORPHANED)

    @property
    def recovers(self) -> bool:
        """True if ranks may be replaced without a restart of this process."""
        return self.lapsed is not None

    def heartbeat(self) -> None:
        """A batch, or a stage of the start, is done."""
        if self._watchdog is not None:
            self._watchdog.heartbeat()

    def finish(self) -> None:
        """The training has ended as it should: no batch is to be expected any more."""
        self.lapsed = None
        if self._watchdog is not None:
            self._watchdog.rest()

    @property
    def notice(self) -> tuple[int, str]:
        """Node of this process, and :attr:`reason`.

        The node by the launcher's number, which stays when ranks are lost or join in the process.
        """
        return Launch.from_env().node_rank, self.reason

    def stop(self, notices: Sequence[tuple[int, str]], *, is_saved: bool) -> int:
        """Exit code of this process when all ranks stop because some were preempted.

        Args:
            notices: :attr:`notice` of every rank.
            is_saved: the step at which they stop is in a checkpoint that is durable.
        """
        node, reason = self.notice
        self._history.end(reason or "peer preempted", is_echo=not reason)
        is_elastic = Launch.from_env().is_elastic
        if is_elastic and (node, PREEMPTED) in notices and not (reason and is_saved):
            return EXIT_LEAVE
        if not is_saved:
            return EXIT_UNSAVED
        return EXIT_RESTART if is_elastic and not reason else 0

    def leave(self) -> None:
        """After :meth:`stop`: nothing is left to do but to end."""
        if Launch.from_env().is_elastic:
            self._be_gone_soon("after the last checkpoint")
        elif self._watchdog is not None:
            self._watchdog.stop()

    def fail(self, exception: BaseException) -> None:
        """The training ends with an exception; others may have had it first."""
        text = str(exception).strip().split("\n")[0][:200]
        is_echo = is_of_a_peer(exception)
        self._history.end(f"{type(exception).__name__}: {text}", is_echo=is_echo)
        if is_echo and Launch.from_env().is_elastic:
            self.finish()
            self._be_gone_soon(f"after {type(exception).__name__}")
        else:
            self.close()

    def _be_gone_soon(self, why: str) -> None:
        """Leaving a group whose ranks are gone may hang, and the launcher waits for the exit."""
        if self._watchdog is not None:
            self._watchdog.end_within(_LAST_SECONDS, f"still running {_LAST_SECONDS:g} s {why}")

    def _last_words(self, why: str) -> None:
        self._history.end(why, is_echo=not why.startswith("no progress"))

    def end_listening(self) -> None:
        """Note no more signals."""
        if self._notices is not None:
            self._notices.stop()
            self._notices = None

    def close(self) -> None:
        """The training is over."""
        self.end_listening()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None


def stop_line(step: int, reasons: list[str], *, saved: int | None) -> str:
    """Log line: the step at which all ranks stop, the preempted ranks, and the last checkpoint.

    Args:
        reasons: why each rank was asked to stop, or empty.
        saved: step of the newest checkpoint that is durable; None: there is none.
    """
    named = ", ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    line = f"elastic: preempted at step {step} ({named})"
    if saved == step:
        return f"{line}; checkpoint committed"
    last = "there is no complete checkpoint"
    if saved is not None:
        last = f"the last complete checkpoint is of step {saved}"
    return f"{line}, which could not be saved; {last}; see the warnings above"


def is_of_a_peer(exception: BaseException) -> bool:
    """Whether an exception says that another rank is gone; torch's are all RuntimeErrors."""
    text = str(exception).lower()
    signs = (
        *("gloo", "nccl", "processgroup", "connection closed", "connection reset"),
        "killed by signal: terminated",  # a worker of a loader, by the launcher
    )
    return isinstance(exception, RuntimeError) and any(sign in text for sign in signs)
