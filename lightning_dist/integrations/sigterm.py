"""SIGTERM as an exception, where nobody else handles it: what is open then is closed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise ``SystemExit(143)`` meanwhile, the code that a shell has for it.

    It does nothing outside of the main thread, and where the program has a handler of its own.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork, which has nothing to close
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
