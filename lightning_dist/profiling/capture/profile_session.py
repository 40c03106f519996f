"""Session that records a rank, with torch's own tools beside it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from lightning_dist.base.private import flight_record
from lightning_dist.measurement.microbenchmark import DeviceClock
from lightning_dist.profiling.capture.events import (
    EndRecord,
    ErrorRecord,
    GenerationRecord,
    RankRecord,
    Record,
    StepRecord,
)
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep, StepTimer

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


_FOR_ERRORS = 0.25
"""Share of the overhead that is allowed."""
_AT = 2
"""The first two steps have other buckets: DDP builds them anew."""
_CALIBRATION = 500
_LONGEST_PERIOD = 1024
_WEIGHT = 0.1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples are spread evenly, whichever of them are taken."""
_FLUSH = 10**9
"""Nanoseconds after which records are in the file at the latest, and a step."""
_TIMEOUT = 2.0
"""Seconds for an accelerator to come to the end of the last steps."""


@dataclass(frozen=True)
class ProfileSessionSettings:
    """Settings of a profile.

    Args:
        max_overhead: share of a step that it may take, 0 to 1; above it, fewer are recorded.
        in_detail: record phases, buckets and spans; False: only how long steps take.
        error_every_n_steps: steps between two samples of the compression error; 0: never.
    """

    max_overhead: float = 0.01
    in_detail: bool = True
    error_every_n_steps: int = 50

    def __post_init__(self) -> None:
        share = self.max_overhead
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(
                "max_overhead must be the share of a step that the profiler may take, above 0 and "
                f"at most 1; got {share!r}"
            )
        every = self.error_every_n_steps
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(
                "error_every_n_steps must be the number of steps between two samples of the "
                f"compression error, 0 for never; got {every!r}"
            )


class ProfileSession:
    """One rank's profile while it is taken: writes steps down, in the thread of the training.

    On an accelerator a step is written down when it is past there, steps later; nothing waits for
    it before the end.

    Args:
        folder: of the run; None: nothing is kept.
        first: number of the step that comes next.
        device_clock: of the work; None: of the host, by ``clock``.
        begin_step: called with the number of a step before it begins; True: something makes it
            longer than it is, such as a trace, and it is not written down.
        on_step, on_error: called with every record of a step or a compression error.
        on_problem: called with what goes wrong on this rank, and what that costs.
        clock: of the host, in nanoseconds.
    """

    def __init__(
        self,
        folder: str | Path | None,
        metadata: RankRecord,
        *,
        settings: ProfileSessionSettings,
        first: int = 0,
        device_clock: DeviceClock | None = None,
        begin_step: Callable[[int], bool] = lambda step: False,
        on_step: Callable[[StepRecord], None] = lambda step: None,
        on_error: Callable[[ErrorRecord], None] = lambda error: None,
        on_problem: Callable[[str], None] = lambda problem: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._sync_every = metadata.sync_every
        self.recorder = Recorder(clock, device_clock=device_clock)
        self._device_clock = self.recorder.device_clock
        self._next_step, self._on_step = begin_step, on_step
        self._on_error, self._on_problem = on_error, on_problem
        self._step = first
        self._file = RankFile(
            folder, rank=metadata.rank, appends=bool(metadata.worker), on_problem=on_problem
        )
        self._written_at = clock()
        self._governor = Governor((1 - _FOR_ERRORS) * settings.max_overhead)
        self._error_governor = Governor(_FOR_ERRORS * settings.max_overhead)
        self._cost = cost_of_an_event(self._device_clock)
        self._writing = 0
        self.is_disturbed = False
        """Whether something makes this step longer than it is; it is not written down."""
        self._pending: deque[PendingStep] = deque()
        self.recorder.blocks = self._sync_every > 0
        self.recorder.on_regrouped = self._regrouped
        self._begin_step()
        self.timer = StepTimer(self._device_clock.now, self.recorder, self._close)
        """The listener to passes and to steps of optimizers."""
        self.note(metadata)
        self._file.flush()  # a rank that is killed at once has said at least who it was

    def note(self, *records: Record) -> None:
        """Write them down with what comes next."""
        # Lines are made in the step that they are of, so that each bears what it costs.
        self._file.write(records)

    def end(self, reason: str, *, timeout: float = _TIMEOUT) -> None:
        """The training is over: all of it is in the file. More may be noted before it is closed.

        Args:
            timeout: seconds for an accelerator to come to the end of the last steps.
        """
        at, because = self._clock(), ""
        try:
            self.timer.end()
            while self._pending and self._clock() < at + timeout * 1e9:
                time.sleep(0.001)
                self._write_what_is_past()
        except RuntimeError as error:  # of whatever is asked of one that has failed
            because = str(error).split("\n")[0]
        if self._pending or because:
            first = self._pending[0].number if self._pending else self._step
            because = because or f"the device did not complete them within {timeout:g} s"
            self._on_problem(f"steps from {first} on are not in the profile: {because}")
        self.recorder.close()
        self.note(EndRecord(reason, at))
        self._file.flush()

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()

    def _regrouped(self, number: int, step: int, reason: str) -> None:
        """Go on at ``step`` with other ranks; one that was under way is taken again."""
        if step > self._step:
            self.timer.end()
        self.timer.drop()
        self._step = step
        self.note(GenerationRecord(number, step, self._clock(), reason))
        self._file.flush()

    def _close(self, step: PendingStep) -> None:
        now, recorder = self._clock(), self.recorder
        error, sampling = recorder.errors.take()
        recording = recorder.cost(self._cost)
        # Writing down the step before was in the time of this one.
        overhead = recording + sampling + recorder.spent + self._writing
        buckets, spans = recorder.take()
        step = step._replace(
            number=self._step,
            phases=step.phases if self._settings.in_detail and not self._sync_every else (),
            buckets=buckets,
            spans=spans,
            detailed=recorder.is_on,
            error=error,
            recording=recording,
            sampling=sampling,
            overhead=overhead,
            was_disturbed=self.is_disturbed,
        )
        self._pending.append(step)
        self._step += 1
        self.is_disturbed = self._next_step(self._step)
        written = self._write_what_is_past()
        self._begin_step()
        self._device_clock.compare()
        if now - self._written_at >= _FLUSH:
            self._written_at = now
            self._file.flush()
        self._writing = self._clock() - now
        if self.is_disturbed:
            return  # what disturbs it is in these times
        for pending, duration in written:
            if pending.sampling:
                every = self._settings.error_every_n_steps
                self._error_governor.spent(pending.sampling / every, of=duration)
            if pending.detailed:
                writing = self._writing / len(written)
                self._governor.spent(pending.recording + writing, of=duration)

    def _write_what_is_past(self) -> list[tuple[PendingStep, int]]:
        """Steps that are noted now, with their durations."""
        written = []
        while self._pending and self._pending[0].is_past(self._device_clock):
            pending = self._pending.popleft()
            record = pending.read(self._device_clock)
            if not pending.was_disturbed:
                written.append((pending, record.duration))
                self.note(record)
                self._on_step(record)
            error = None if pending.error is None else pending.error()
            if error is not None:
                self.note(error)
                self._on_error(error)
        return written

    def _begin_step(self) -> None:
        """Decide what to look at."""
        step, every, recorder = self._step, self._settings.error_every_n_steps, self.recorder
        in_detail = self._settings.in_detail
        recorder.is_on = in_detail and self._governor.wants(step)
        # Of local updates all steps of a window: one of them exchanges.
        window, windows = step // max(self._sync_every, 1), every // max(self._sync_every, 1) or 1
        due = in_detail and every > 0 and window % windows == min(_AT, windows - 1)
        looks = due and self._error_governor.wants(step // every)
        recorder.errors.ask(step if looks else None)


class Governor:
    """Chooses the steps that are recorded in detail: fewer, where that costs more than is allowed.

    Ranks decide for themselves; the steps of one that looks at fewer are among those of the others.
    Their distance varies, so that what happens every n-th step is seen as often as it happens.

    Args:
        max_overhead: share of a step that the profiler may take.
    """

    def __init__(self, max_overhead: float) -> None:
        self._max_overhead = max_overhead
        self.period = 1
        """One of so many steps is recorded in detail, a power of two."""
        self._share = 0.0

    def wants(self, step: int) -> bool:
        """Whether ``step`` is to be recorded in detail."""
        return step * _GOLDEN % 2**64 < 2**64 // self.period

    def spent(self, nanoseconds: float, *, of: int) -> None:
        """A step of ``of`` nanoseconds was recorded in detail, which took so many of them."""
        share = nanoseconds / max(of, 1)
        self._share += (share - self._share) * (_WEIGHT if self._share else 1.0)
        mean = self._share / self.period
        if mean > self._max_overhead and self.period < _LONGEST_PERIOD:
            self.period *= 2
        elif self.period > 1 and 2 * mean < self._max_overhead / 2:
            self.period //= 2


def cost_of_an_event(device_clock: DeviceClock | None = None) -> float:
    """Nanoseconds that one call of a recorder takes on this machine."""
    recorder = Recorder(device_clock=device_clock)
    begin = time.perf_counter_ns()
    for _ in range(_CALIBRATION):
        recorder.works(0, "encode")()
    return (time.perf_counter_ns() - begin) / (2 * _CALIBRATION)
