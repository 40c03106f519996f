"""Processes of a trial: forks that report what they do, and may be killed."""

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BOUND_S = 30.0
"""Nothing in a trial takes longer; what does counts as a hang."""

Message = dict[str, Any]
Report = Callable[..., None]

_write = os.write  # trials replace os.write by one that fails


class Child:
    """A fork of this process that runs ``run(report)`` in a session of its own, and ends.

    The caller has no threads but this one, so that the fork is whole.
    """

    def __init__(self, run: Callable[[Report], None]) -> None:
        self._pipe, theirs = os.pipe()
        self._buffer = b""
        self.ended = False
        self.pid = os.fork()
        if self.pid == 0:
            _serve(run, theirs)
        os.close(theirs)
        self._reaped = False

    def receive(self, timeout: float) -> Message | None:
        """The next message; None after ``timeout`` seconds, and when ``ended``."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._pipe, 1 << 16)
            if not data:
                self.ended = True
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def send(self, number: signal.Signals) -> None:
        if not self._reaped:
            os.kill(self.pid, number)

    def children(self) -> list[int]:
        """Processes that it has started and that are still its own."""
        found: list[int] = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended in between
                found += map(int, path.read_text().split())
        return found

    def close(self) -> None:
        """Kill it, if it still runs, and reap it."""
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._pipe)
            self._reaped = True


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _serve(run: Callable[[Report], None], pipe: int) -> None:
    def report(event: str, **fields: Any) -> None:
        _write(pipe, json.dumps({"event": event, **fields}).encode() + b"\n")

    try:
        os.setsid()
        run(report)
    except BaseException:
        report("error", reason=traceback.format_exc()[-3000:])
    finally:
        os._exit(0)
