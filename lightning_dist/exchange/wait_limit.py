"""Waits for collectives that end: at a limit, or when somebody gives up.

gloo cannot abort a collective: one whose peer is silent stays under way until the peer's socket
closes. What can be bounded is the wait for it. Such a collective is left behind, with its group.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

_SLICE = 0.1
"""Seconds of one wait, after which a thread that waits sees that it is to give up."""


class WaitLimit:
    """Limit of every wait for a collective, shared by the channels of a network.

    ``seconds``: of one wait; None: as long as the process group's own timeout. On an accelerator
    waiting orders streams and does not block, and no wait can be told to end: there the backend's
    own timeout bounds collectives (``ProcessGroup.set_timeout``), and a reducer that is closed or
    rebound looks at its stream, for ``seconds`` if there are any, before it aborts its groups.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """End all waits, those of now within a tenth of a second, with an error."""
        self._given_up.set()

    def wait(self, work: dist.Work, *, what: str) -> object:
        """Until ``work`` has ended.

        Args:
            what: it is, for the message.

        Raises:
            RuntimeError: the limit has passed, or somebody has given up; or what became of
                ``work``.
        """
        start = time.monotonic()
        while True:
            if self._given_up.is_set():
                raise RuntimeError(f"gave up waiting for {what}")
            left = _SLICE if self.seconds is None else start + self.seconds - time.monotonic()
            if left <= 0:
                raise RuntimeError(
                    f"no answer from the other ranks within {self.seconds:g} s in {what}: a rank "
                    "is gone, hangs, or is slower than that"
                )
            try:
                # Whole milliseconds count, and none of them means no limit.
                return work.wait(timedelta(seconds=max(min(left, _SLICE), 0.001)))
            except RuntimeError:
                if work.is_completed():
                    return work.wait()  # since then, or with an error of its own
