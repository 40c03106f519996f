"""One rank's profile while it is being taken: from events to lines in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.profiling.folder import RankFile
from lightning_dist.profiling.governor import Governor
from lightning_dist.profiling.lines import to_line
from lightning_dist.profiling.recorder import Recorder, cost_of_an_event
from lightning_dist.profiling.records import (
    EndRecord,
    ErrorRecord,
    RankRecord,
    Record,
    StepRecord,
)
from lightning_dist.profiling.timer import Cut, StepTimer

_FOR_LOSSES = 0.25
"""Share of the budget."""
_AT = 2
"""The first two steps have other buckets: DDP builds them anew."""


@dataclass(frozen=True)
class SessionSettings:
    """How a profile is taken.

    Args:
        budget: most that it may take of a step, 0 to 1; it looks at fewer steps rather than more.
        flush_s: seconds after which records are in the file at the latest (and a step).
        in_detail: record phases, buckets and spans; False: only how long steps take.
        error_every: steps between two looks at what compression loses, of one bucket; 0: never.
    """

    budget: float = 0.01
    flush_s: float = 1.0
    in_detail: bool = True
    error_every: int = 50

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(
                f"budget is the share of a step that the profiler may take, above 0 and at most 1; "
                f"got {self.budget}"
            )
        if self.error_every < 0:
            raise ValueError(
                "error_every is the number of steps after which compression errors are looked at, "
                f"0 for never; got {self.error_every}"
            )


class Session:
    """Is told what happens, in the thread of the training, and writes steps down.

    Args:
        folder: of the run; None: nothing is kept.
        about: of this rank.
        first: number of the step that comes next.
        on_step: called with every step, those too that are disturbed.
        on_error: called with every compression error that was.
        on_problem: called with what goes wrong on this rank, and what that costs.
        clock: in nanoseconds.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: str | Path | None,
        about: RankRecord,
        *,
        settings: SessionSettings,
        first: int = 0,
        on_step: Callable[[StepRecord], None] = lambda step: None,
        on_error: Callable[[ErrorRecord], None] = lambda error: None,
        on_problem: Callable[[str], None] = lambda problem: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._on_step, self._on_error, self._on_problem = on_step, on_error, on_problem
        self._step = first
        self._file = None if folder is None else RankFile(folder, rank=about.rank)
        self._unwritten: list[str] = []
        self._written_at = clock()
        self._governor = Governor((1 - _FOR_LOSSES) * settings.budget)
        self._losses_governor = Governor(_FOR_LOSSES * settings.budget)
        self._cost = cost_of_an_event()
        self._writing = 0
        self.is_disturbed = False
        """Whether something else makes steps longer than they are; they are not written down."""
        self.recorder = Recorder(clock)
        self._begin_step()
        self._timer = StepTimer(clock())
        self.note(about)
        self._flush()  # a rank that is killed at once has said at least who it was

    def forward(self) -> None:
        """A forward pass of training begins."""
        now = self._clock()
        if (cut := self._timer.forward(now)) is not None:
            self._close(cut, now)
        elif self.recorder.has_exchanged:
            self.recorder.drop()  # of a step that is not over only the last exchanges count

    def forward_ended(self) -> None:
        """It has ended."""
        self._timer.forward_ended()

    def backward(self) -> None:
        """A backward pass begins."""
        self._timer.backward(self._clock())

    def backward_ended(self, *, synchronised: bool) -> None:
        """It has ended; ``synchronised``: with the mean over all ranks."""
        self._timer.backward_ended(self._clock(), synchronised=synchronised)

    def stepping(self) -> None:
        """An optimizer begins its step."""
        if self.recorder.has_exchanged:
            self._timer.stepping(self._clock())

    def stepped(self, *, within_forward: bool = False) -> None:
        """It has made it; ``within_forward``: a forward pass of training is still under way."""
        now = self._clock()
        self._timer.stepped(now)
        if within_forward and (cut := self._timer.stepped_within()) is not None:
            self._close(cut, now)

    def set_apart(self) -> None:
        """What was since the last step belongs to none: a validation, a checkpoint."""
        now = self._clock()
        if (cut := self._timer.restart(now)) is not None:
            self._close(cut, now)

    def note(self, *records: Record) -> None:
        """Write them down with what comes next."""
        # Lines are made in the step that they are of, so that each bears what it costs.
        if self._file is not None:
            self._unwritten += map(to_line, records)

    def end(self, reason: str) -> None:
        """The training is over: all of it is in the file. More may be noted before it is closed."""
        self.set_apart()
        self.recorder.close()
        self.note(EndRecord(reason))
        self._flush()

    def close(self) -> None:
        """Nothing more comes."""
        self._flush()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._on_problem(f"{file.path} may not be whole: {error.strerror}")

    def _close(self, cut: Cut, now: int) -> None:
        is_detailed, recorder = self.recorder.is_on, self.recorder
        was_disturbed = self.is_disturbed
        # Writing down the step before was in the time of this one.
        errors, looking = recorder.losses.take()
        of_hooks, recording = recorder.spent, recorder.cost(self._cost)
        overhead = recording + self._writing + looking + of_hooks
        buckets, spans = recorder.take(cut.begin) if is_detailed else ((), ())
        record = StepRecord(
            self._step,
            cut.begin,
            cut.end - cut.begin,
            cut.phases if self._settings.in_detail else (),
            buckets,
            spans,
            detailed=is_detailed,
            overhead=overhead,
        )
        if not was_disturbed:
            self.note(record)
        self.note(*errors)
        for error in errors:
            self._on_error(error)
        self._step += 1
        self._on_step(record)
        recorder.drop()
        self._begin_step()
        self._flush_if_due(now)
        self._writing = self._clock() - now
        if was_disturbed or self.is_disturbed:
            return  # what disturbs it is in these times
        if looking:
            every = self._settings.error_every
            self._losses_governor.spent(looking / every, of=record.duration)
        if is_detailed:
            self._governor.spent(recording + self._writing, of=record.duration)

    def _begin_step(self) -> None:
        """Decide what to look at."""
        step, every, recorder = self._step, self._settings.error_every, self.recorder
        in_detail = self._settings.in_detail
        recorder.is_on = in_detail and self._governor.wants(step)
        due = in_detail and every > 0 and step % every == min(_AT, every - 1)
        looks = due and self._losses_governor.wants(step // every)
        recorder.losses.ask(step if looks else None)

    def _flush_if_due(self, now: int) -> None:
        if now - self._written_at >= self._settings.flush_s * 1e9:
            self._written_at = now
            self._flush()

    def _flush(self) -> None:
        lines, self._unwritten = self._unwritten, []
        if self._file is None:
            return
        try:
            self._file.write_lines(lines)
        except OSError as error:  # a full disk is no reason to stop training
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()
            self._on_problem(
                f"{file.path}: {error.strerror}; the steps of this rank are not kept any more"
            )
