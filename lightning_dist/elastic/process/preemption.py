"""Notices that this process or its machine will be preempted: signals and a check of the user's."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from weakref import WeakSet

from lightning_dist.base.log import warn

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
        """Of the first notice; empty before it."""

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
        for each in self._signals:
            signal.signal(each, _only_wake)
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
    for each in list(_LISTENING):
        signal.set_wakeup_fd(-1)
        for number in each._signals:
            if signal.getsignal(number) is _only_wake:
                signal.signal(number, signal.SIG_DFL)
    _LISTENING.clear()


os.register_at_fork(after_in_child=_after_fork)
