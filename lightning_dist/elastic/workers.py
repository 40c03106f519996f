"""Workers of data loaders, which a launcher's signal reaches as well as their process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


class ToldOnce:
    """A ``worker_init_fn``: the first of each signal is left to the process that has the worker.

    A launcher sends its signal to the whole process group. A worker that ends at it takes the
    training down before there is a checkpoint. The second ends it: Python sends one at the end.

    Args:
        usual: what the user wants a worker to begin with.
        signals: that are sent to groups.
    """

    def __init__(
        self, usual: Callable[[int], None] | None, signals: Sequence[signal.Signals]
    ) -> None:
        self.usual = usual
        self._signals = tuple(signals)

    def __call__(self, worker: int) -> None:
        for each in self._signals:
            signal.signal(each, _leave_it)
        if self.usual is not None:
            self.usual(worker)


def keep_workers(loader: Any, signals: Sequence[signal.Signals]) -> None:
    """Let the workers of ``loader`` outlive the first of ``signals``, if it has workers."""
    usual = getattr(loader, "worker_init_fn", None)
    if getattr(loader, "num_workers", 0) > 0 and not isinstance(usual, ToldOnce):
        loader.worker_init_fn = ToldOnce(usual, signals)


def _leave_it(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
