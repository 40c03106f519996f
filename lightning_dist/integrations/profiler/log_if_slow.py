"""Says what is waited for, where that takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def log_if_slow(seconds: float, say: Callable[[str], None], text: str) -> Iterator[None]:
    """Call ``say`` with ``text`` if this is not over after so many seconds, from a thread."""
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True  # nobody waits for it where the process ends meanwhile
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
