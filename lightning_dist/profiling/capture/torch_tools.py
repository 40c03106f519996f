"""torch's own tools beside a profile: its profiler over a few steps, and its flight recorder."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from lightning_dist.base.private import flight_record

STEPS = 3
"""Steps that are traced after a signal."""

_TAKEN = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
"""Signals that nobody can catch, or that end a training."""


def require_traceable(wanted: object) -> None:
    """Raise ValueError if ``wanted`` is neither steps nor a signal that can start a trace."""
    if isinstance(wanted, range):
        if not wanted or min(wanted) < 0:
            raise ValueError(
                "torch_profiler as a range has a step, and none below 0, as range(100, 103) does; "
                f"got {wanted}"
            )
    elif not isinstance(wanted, signal.Signals) or wanted in _TAKEN:
        raise ValueError(
            "torch_profiler must be a range of steps, such as range(100, 103), or a signal other "
            f"than SIGKILL, SIGSTOP and SIGTERM, such as signal.SIGUSR2; got {wanted!r}"
        )


class TorchTracer:
    """Writes ``torch-trace-rank<r>-step<n>.json.gz``, a trace of every operator, for Perfetto.

    Args:
        wanted: which steps; or a signal, after which come :data:`STEPS` steps of the process that
            received it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        wanted: range | signal.Signals,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._folder, self._rank = folder, rank
        self._on_problem = on_problem
        self._is_asked = False
        self._profiler: torch.profiler.profile | None = None
        self._first: int | None = None
        self._steps = range(0)
        self._restore: Callable[[], object] = lambda: None
        if isinstance(wanted, range):
            self._steps = wanted
        elif threading.current_thread() is threading.main_thread():
            usual = signal.signal(wanted, self._ask)
            self._restore = lambda: signal.signal(wanted, usual)
        else:
            raise ValueError(
                f"torch_profiler={wanted.name} needs the main thread, where signals arrive, and "
                "this training runs in another; give torch_profiler=range(...)"
            )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def begin_step(self, step: int) -> bool:
        """Trace ``step``, which comes next, or not.

        Returns True if that makes it longer: it is traced, or the trace before it was just written.
        """
        if self._is_asked and self._profiler is None:
            self._is_asked = False
            self._steps = range(step, step + STEPS)
        if step in self._steps and self._profiler is None:
            self._first = step
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif step not in self._steps and self._profiler is not None:
            self._write(self._profiler)
            return True
        return self._profiler is not None

    def close(self) -> None:
        """Trace nothing more."""
        if self._profiler is not None:
            self._write(self._profiler)
        elif self._steps and self._first is None:
            self._on_problem(
                f"torch_profiler={self._steps}: none of these steps was run; no trace was written"
            )
        with suppress(ValueError):  # of a thread that closes for the main one: the process ends
            self._restore()
        self._restore = lambda: None

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._profiler = None
        profiler.stop()
        path = self._folder / f"torch-trace-rank{self._rank}-step{self._first}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:  # no reason to stop training
            self._on_problem(f"{path} was not written: {error.strerror}")


def dump_flight_record(folder: Path, *, rank: int) -> Path | None:
    """Write ``flight-rank<r>.json``: the newest collectives of this rank, where torch keeps them.

    Returns the file, or None where there is nothing to write: ``TORCH_FR_BUFFER_SIZE=0``, which is
    the default of torch 2.9.
    """
    content = flight_record()
    if not json.loads(content).get("entries"):
        return None
    path = folder / f"flight-rank{rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
