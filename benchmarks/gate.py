"""A gate at which a rank waits for its launcher, without a network and without sleeping."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path


class Gate:
    """A named pipe. A rank waits in `wait_at`; the launcher looks now and then with `let_through`.

    path: where the pipe is made; it must not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)

    def let_through(self, prepare: Callable[[], None]) -> None:
        """If a rank waits at the gate, call `prepare` and let it go on; never blocks."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nobody has the pipe open for reading
                return
            raise
        try:
            prepare()
        finally:
            os.close(descriptor)


def wait_at(path: str) -> None:
    """Block until the launcher lets this process through."""
    Path(path).read_bytes()
