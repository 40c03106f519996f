"""Slots of this machine: at most so many ranks of tests run at a time, whatever workers there are.

More of them would only take turns, and those that wait for another's message would wait for longer
than the limits of the package allow.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

RANKS_PER_CORE = 4
"""Half of the ranks of whole jobs wait for others, for a disk or for a limit: two can run."""
_POLL = 0.02  # seconds


@contextmanager
def slots() -> Iterator[str]:
    """Folder of a file for each slot: to lock it is to have it, until the process ends at most."""
    with tempfile.TemporaryDirectory(prefix="slots-") as folder:
        for number in range(RANKS_PER_CORE * len(os.sched_getaffinity(0))):
            Path(folder, str(number)).touch()
        yield folder


@contextmanager
def taking(folder: str, count: int) -> Iterator[None]:
    """Waits for ``count`` slots, or for all if there are fewer. First come, first served."""
    with ExitStack() as held:
        files = [held.enter_context(path.open()) for path in sorted(Path(folder).iterdir())]
        wanted = min(count, len(files))
        turn = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
            while wanted:
                taken = next((file for file in files if _is_free(file)), None)
                if taken is None:
                    time.sleep(_POLL)
                else:
                    files.remove(taken)
                    held.callback(fcntl.flock, taken, fcntl.LOCK_UN)  # a fork has the file too
                    wanted -= 1
        finally:
            os.close(turn)
        yield


def _is_free(file: IO[str]) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
