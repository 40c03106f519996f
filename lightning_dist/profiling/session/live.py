"""A profile while training goes on: what loggers get, and SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean, median
from types import FrameType
from typing import Any

from msgspec import structs

from lightning_dist.elastic.process.lifecycle import PreemptionListener
from lightning_dist.profiling.analysis.breakdown import blocked_in, exposed_in, raw_of
from lightning_dist.profiling.analysis.parts import Summary, difference, length, union
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, ErrorRecord, StepRecord
from lightning_dist.profiling.whatif.scenarios import DDP

CODE = 128 + signal.SIGTERM
"""That a shell has for it."""
_PATIENCE = 10.0
"""Seconds for the main thread to come back to Python. Launchers kill after 30."""


class Sigterm:
    """State of SIGTERM.

    Args:
        when_stuck: called from a thread where the main one does not come back to Python, as in a
            collective that a rank never comes to; the process ends after it.
    """

    def __init__(self, when_stuck: Callable[[], None]) -> None:
        self._when_stuck = when_stuck
        self._answered = threading.Event()
        self._is_closing = False
        self.came = False

    def closing(self) -> None:
        """Raise nothing from now on: somebody is closing what is open."""
        self._is_closing = True

    def arrive(self) -> None:
        """Answer the signal, in the main thread."""
        self._answered.set()
        self.came = True
        if not self._is_closing:
            raise SystemExit(CODE)

    def watch(self, reason: str) -> None:
        """End the process if nobody answers the signal; in a thread, when it has arrived."""
        if self._answered.wait(_PATIENCE):
            return
        try:
            self._when_stuck()
        finally:
            sys.stdout.flush()
            os._exit(CODE)


@contextmanager
def sigterm_raises(when_stuck: Callable[[], None] = lambda: None) -> Iterator[Sigterm]:
    """Let SIGTERM raise ``SystemExit(143)`` meanwhile.

    It does nothing outside of the main thread, and where the program has a handler of its own.
    """
    state = Sigterm(when_stuck)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield state
        return
    owner = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork, which has nothing to close
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        state.arrive()

    notices = PreemptionListener([signal.SIGTERM], on_notice=state.watch)
    notices.start()
    signal.signal(signal.SIGTERM, leave)
    try:
        yield state
    finally:
        notices.stop()
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_STEPS = 32
"""Newest steps that a value in the loggers is the mean of, at most."""
_MS, _MB = 1e6, 1e6
_SHARES = frozenset({"exposed_fraction", "profiler_overhead"})
"""Metrics that are shares of the step."""
_OF_ERRORS = {
    "error_relative_l2": "relative_l2",
    "error_cosine": "cosine",
    "residual_ratio": "residual_ratio",
}


class LiveProfile:
    """Collects the steps of this rank between two times of logging."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_STEPS)
        self._errors: deque[ErrorRecord] = deque(maxlen=_STEPS)

    def add(self, step: StepRecord) -> None:
        """A step is over."""
        if step.detailed:
            self._steps.append(step)

    def add_error(self, error: ErrorRecord) -> None:
        """The error of a compression was looked at."""
        self._errors.append(error)

    def take(self) -> dict[str, float]:
        """Means of the newest steps by their names in loggers, once; empty without a step."""
        rows = [row for step in self._steps if (row := of_one_rank(step))]
        self._steps.clear()
        if not rows:
            return {}
        steps = [row["step_ms"] for row in rows]
        metrics = {
            # Shares by the length of the step, as in the headline: that of all of them together.
            f"comm/{name}": fmean(
                [row.get(name, 0.0) for row in rows], weights=steps if name in _SHARES else None
            )
            for name in dict.fromkeys(name for row in rows for name in row)
        }
        errors = of_errors(map(structs.asdict, self._errors))
        self._errors.clear()
        return metrics | {f"comm/{name}": value for name, value in errors.items()}


def metrics_of(summary: Summary) -> dict[str, float]:
    """Numbers of a summary, by the name they have in loggers; what is None is left out."""
    parts, traffic = summary.breakdown_ms, summary.traffic
    of_all, in_detail = summary.step_ms.get("mean"), summary.detailed_step_ms
    metrics: dict[str, float | None] = {
        # What stands beside exposed_ms is the step that it is a share of.
        "comm/step_ms": of_all if in_detail is None else in_detail,
        "comm/all_steps_ms": of_all,
        "comm/exposed_ms": summary.exposed_ms,
        "comm/exposed_fraction": summary.exposed_fraction,
        "comm/exposed_fsdp_ms": summary.exposed_fsdp_ms or None,
        "comm/hidden_ms": summary.hidden_ms,
        "comm/overlap_fraction": summary.overlap_fraction,
        "comm/exposed_wait_ms": parts.get("exposed_wait"),
        "comm/exposed_transfer_ms": parts.get("exposed_transfer"),
        "comm/straggler_rank": summary.straggler,
        "comm/profiler_overhead": summary.profiler_overhead,
    }
    if traffic is not None:
        metrics |= {
            "comm/raw_mb": traffic.raw_bytes / 1e6,
            "comm/wire_mb": traffic.wire_bytes / 1e6,
            "comm/compression_ratio": traffic.compression_ratio,
            "comm/wire_gbps": traffic.wire_gbps,
            "comm/ddp_equivalent_busbw_gbps": traffic.ddp_equivalent_busbw_gbps,
            "comm/link_utilization": traffic.link_utilization,
        }
    metrics |= {f"comm/{name}": value for name, value in of_errors(summary.errors).items()}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def of_one_rank(record: StepRecord) -> dict[str, float]:
    """Metrics by name, of a step that was recorded in detail; empty if nothing was exchanged.

    Waiting for others is part of what is exposed: to tell it apart takes the other ranks. Stock DDP
    has no codec, and no time of one.
    """
    if not (record.detailed and record.buckets and record.duration):
        return {}
    window = exposed_in(record)
    exposed = length(window)
    exchanges = union((s.begin, s.end) for s in record.spans if s.phase == "exchange")
    of_fsdp = sum(span.sent for span in record.spans if span.bucket == OF_NO_BUCKET)
    raw = raw_of(record)
    wire = of_fsdp + sum(bucket.intra + bucket.inter for bucket in record.buckets)
    metrics = {
        "step_ms": record.duration / _MS,
        "exposed_ms": exposed / _MS,
        "exposed_fraction": exposed / record.duration,
        "hidden_ms": length(difference(exchanges, window)) / _MS,
        "raw_mb": raw / _MB,
        "wire_mb": wire / _MB,
        "compression_ratio": raw / wire if wire else 1.0,
        "profiler_overhead": record.overhead / record.duration,
    }
    if of_fsdp:
        metrics["exposed_fsdp_ms"] = length(blocked_in(record)) / _MS
    if any(bucket.codec != DDP for bucket in record.buckets):
        codec = sum(s.end - s.begin for s in record.spans if s.phase != "exchange")
        metrics["codec_total_ms"] = codec / _MS
    return metrics


def of_errors(errors: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Medians of compression errors, by name, without what no error has."""
    values: dict[str, list[float]] = {name: [] for name in _OF_ERRORS}
    for error in errors:
        for name, field in _OF_ERRORS.items():
            if error[field] is not None:
                values[name].append(error[field])
    return {name: median(ratios) for name, ratios in values.items() if ratios}
