"""torch's own profiler over a few steps, for what happens inside of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

STEPS = 3
"""So many steps are looked at after a signal."""


class Zoom:
    """Writes ``zoom-rank<r>-step<n>.json.gz``, a trace of every operator, for Perfetto.

    Args:
        folder: of the run.
        wanted: which steps; or a signal, after which come :data:`STEPS` steps of the process that
            received it.
        on_change: called with whether it disturbs the step that begins: it is on, or the trace of
            the steps before is written in it.
        on_problem: called with what went wrong.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        wanted: range | signal.Signals,
        on_change: Callable[[bool], None] = lambda is_on: None,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._folder, self._rank = folder, rank
        self._on_change, self._on_problem = on_change, on_problem
        self._steps = wanted if isinstance(wanted, range) else range(0)
        self._signal = None if isinstance(wanted, range) else wanted
        self._is_asked = False
        self._profiler: Any = None
        self._has_written = False
        self._first = 0
        self._usual: Any = None
        if self._signal is not None:
            if threading.current_thread() is not threading.main_thread():
                raise ValueError(
                    f"zoom={self._signal.name} needs the main thread, where signals arrive, and "
                    "this training runs in another; give zoom=range(...)"
                )
            self._usual = signal.signal(self._signal, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def begin_step(self, step: int) -> None:
        """Between two steps: look at ``step``, or not."""
        if self._has_written:
            self._has_written = False
            self._on_change(False)
        if self._is_asked and self._profiler is None:
            self._is_asked = False
            self._steps = range(step, step + STEPS)
        if step in self._steps and self._profiler is None:
            self._first = step
            self._on_change(True)
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif step not in self._steps and self._profiler is not None:
            self._end()
            self._has_written = True

    def close(self) -> None:
        """Look no more."""
        if self._profiler is not None:
            self._end()
        if self._signal is not None:
            with suppress(ValueError):  # of a thread that closes for the main one: the process ends
                signal.signal(self._signal, self._usual)
            self._signal = None

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = self._folder / f"zoom-rank{self._rank}-step{self._first}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:  # no reason to stop training
            self._on_problem(f"{path} was not written: {error.strerror}")
