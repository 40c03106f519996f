"""Life of a process: signals, preemption notices, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import FrameType
from weakref import WeakSet

from lightning_dist.base.log import warn
from lightning_dist.elastic.history import RunHistory
from lightning_dist.elastic.process.watchdog import Watchdog
from lightning_dist.ranks.launch import Launch
from lightning_dist.settings.run import RunSettings

PREEMPTED = "preemption notice"
"""The reason if the check reported a preemption of the machine."""

_PATIENCE = 1.0
"""Seconds for the thread to end."""

_LISTENING: WeakSet[PreemptionListener] = WeakSet()


class PreemptionListener:
    """Listens to signals and to a cloud's notice, without ever interrupting the training.

    A signal only leaves its number; a thread reads it at once, also while the main thread waits in
    a collective.

    Args:
        signals: which of them are notices.
        check: asked every ``poll_interval`` seconds, on a thread; whether the machine is about to
            go.
        on_notice: called from a thread with the reason, at the first notice.
    """

    def __init__(
        self,
        signals: Iterable[signal.Signals],
        *,
        check: Callable[[], bool] | None = None,
        poll_interval: float = 5.0,
        on_notice: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._signals = tuple(signals)
        self._check = check
        self._poll_s = poll_interval
        self._on_notice = on_notice
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._open: tuple[socket.socket, threading.Thread] | None = None
        self._old_fd = -1
        self.reason = ""
        """Reason of the first notice; empty before it."""

    def start(self) -> None:
        """Begin to listen; to signals in the main thread only, where Python has its handlers."""
        assert self._open is None
        if threading.current_thread() is threading.main_thread():
            self._start_handlers()
        elif self._check is None:
            warn(
                "Signals reach the main thread only, and this training runs in another: SIGTERM "
                "leads to no checkpoint; give preemption_check=, or train in the main thread"
            )
        if self._check is not None:
            threading.Thread(target=self._poll, args=(self._check,), daemon=True).start()

    def _start_handlers(self) -> None:
        here, there = socket.socketpair()
        there.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, _only_wake)
        _LISTENING.add(self)
        listener = threading.Thread(target=self._listen, args=(here,), daemon=True)
        self._open = there, listener
        listener.start()

    def stop(self) -> None:
        """Listen no more. Signal handlers stay; who installed others before puts them back."""
        self._ended.set()
        _LISTENING.discard(self)
        if self._open is not None:
            (there, listener), self._open = self._open, None
            signal.set_wakeup_fd(self._old_fd)
            # Ends the thread, which closes the other end. Closing alone would not: processes that
            # were forked meanwhile, as workers of a DataLoader, have this end open too.
            there.shutdown(socket.SHUT_RDWR)
            there.close()
            if listener is not threading.current_thread():
                listener.join(_PATIENCE)  # it may be busy with a notice

    def give(self, reason: str) -> None:
        """Take note; the first reason counts."""
        with self._lock:
            if self.reason:
                return
            self.reason = reason
        self._on_notice(reason)

    def _listen(self, here: socket.socket) -> None:
        with here:
            while numbers := here.recv(64):
                for number in numbers:
                    if number in self._signals:
                        self.give(signal.Signals(number).name)
                    if self._old_fd != -1:
                        with suppress(OSError):  # full, or closed: not our loss
                            os.write(self._old_fd, bytes([number]))

    def _poll(self, check: Callable[[], bool]) -> None:
        while not self._ended.wait(self._poll_s):
            try:
                if check():
                    self.give(PREEMPTED)
                    return
            except Exception as error:
                warn(
                    "preemption_check() failed and will not be called again: "
                    f"{type(error).__name__}: {error}"
                )
                return


def _only_wake(number: int, frame: FrameType | None) -> None:
    """A handler has to be there so that the signal does not end the process."""


def _after_fork() -> None:
    """A child ends at its signals as any other process, and its parent does not hear of them."""
    for listener in list(_LISTENING):
        signal.set_wakeup_fd(-1)
        for number in listener._signals:
            if signal.getsignal(number) is _only_wake:
                signal.signal(number, signal.SIG_DFL)
    _LISTENING.clear()


os.register_at_fork(after_in_child=_after_fork)


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


class Ended(SystemExit):
    """This process ends with a code, because all ranks stop or it cannot go on."""


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
        """Let this process end, since nothing is left to do after :meth:`stop`."""
        if Launch.from_env().is_elastic:
            self._be_gone_soon("after the last checkpoint")
        elif self._watchdog is not None:
            self._watchdog.stop()

    def fail(self, exception: BaseException, *, is_echo: bool) -> None:
        """The training ends with an exception.

        Args:
            is_echo: another rank failed first, and a collective here for that reason.
        """
        text = str(exception).strip().split("\n")[0][:200]
        self._history.end(f"{type(exception).__name__}: {text}", is_echo=is_echo)
        # Errors of C++ in a backward pass, DDP's own collectives among them, have no other class.
        may_hang = is_echo or type(exception) is RuntimeError
        if may_hang and Launch.from_env().is_elastic:
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
