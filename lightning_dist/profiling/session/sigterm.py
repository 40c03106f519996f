"""SIGTERM as an exception, where nobody else handles it: what is open then is closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_dist.elastic.process.lifecycle import PreemptionListener

CODE = 128 + signal.SIGTERM
"""That a shell has for it."""
_PATIENCE = 10.0
"""Seconds for the main thread to come back to Python. Launchers kill after 30."""


class Sigterm:
    """State of SIGTERM.

    Args:
        when_stuck: called from a thread where the main one does not come back to Python, as in a
            collective that a rank never comes to; the process ends after it.
    """

    def __init__(self, when_stuck: Callable[[], None]) -> None:
        self._when_stuck = when_stuck
        self._answered = threading.Event()
        self._is_closing = False
        self.came = False

    def closing(self) -> None:
        """From now on it raises nothing: somebody is closing what is open."""
        self._is_closing = True

    def arrive(self) -> None:
        """In the main thread."""
        self._answered.set()
        self.came = True
        if not self._is_closing:
            raise SystemExit(CODE)

    def watch(self, reason: str) -> None:
        """In a thread, when it has arrived."""
        if self._answered.wait(_PATIENCE):
            return
        try:
            self._when_stuck()
        finally:
            sys.stdout.flush()
            os._exit(CODE)


@contextmanager
def sigterm_raises(when_stuck: Callable[[], None] = lambda: None) -> Iterator[Sigterm]:
    """Let SIGTERM raise ``SystemExit(143)`` meanwhile.

    It does nothing outside of the main thread, and where the program has a handler of its own.
    """
    state = Sigterm(when_stuck)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield state
        return
    owner = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork, which has nothing to close
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        state.arrive()

    notices = PreemptionListener([signal.SIGTERM], on_notice=state.watch)
    notices.start()
    signal.signal(signal.SIGTERM, leave)
    try:
        yield state
    finally:
        notices.stop()
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
