"""Signals as exceptions, so that a `with` block cleans up whichever way it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into an exception and ignore those that follow.

    Ignoring them until the block is left keeps an impatient second Ctrl-C out of the clean-up.
    A signal that the process was started to ignore stays ignored; outside the main thread, where
    Python delivers no signals, this does nothing.
    """
    raised = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            return
        raised = True
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
