"""The clocks of this host."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from lightning_dist.cli.doctor_finding import Finding

SOURCES = Path("/sys/devices/system/clocksource/clocksource0")
SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
FINEST_NS = 1000
"""Of a time stamp; coarser ones would show in a profile."""
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronised


def clocks(sources: Path = SOURCES) -> Iterator[Finding]:
    """Where time stamps come from, and whether other hosts have the same time."""
    yield _source(sources)
    yield _synchronised()
    yield _resolution()


def _source(sources: Path) -> Finding:
    try:
        current = (sources / "current_clocksource").read_text().strip()
        available = (sources / "available_clocksource").read_text().split()
    except OSError:
        return Finding("clock source", "n/a", f"{sources} cannot be read")
    if current not in SLOW_SOURCES:
        return Finding("clock source", "ok", current)
    faster = [each for each in available if each not in SLOW_SOURCES]
    fix = (
        f"echo {faster[0]} > {sources}/current_clocksource"
        if faster
        else "dmesg | grep -i clocksource  # why the kernel gave up the faster one"
    )
    what = f"{current}: to read it takes microseconds, and every operation on a GPU does"
    return Finding("clock source", "warning", what, fix)


def _synchronised() -> Finding:
    name = "time of day"
    try:
        adjust = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return Finding(name, "n/a", "this system does not tell whether it is synchronised")
    state = adjust(ctypes.create_string_buffer(512))  # struct timex, all 0: change nothing
    if state < 0:
        return Finding(name, "n/a", "the kernel does not tell whether it is synchronised")
    if state == _TIME_ERROR:
        what = "not synchronised: logs of several hosts do not line up"
        return Finding(name, "warning", what, "timedatectl set-ntp true")
    return Finding(name, "ok", "synchronised")


def _resolution() -> Finding:
    name = "time stamps"
    resolution = time.get_clock_info("monotonic").resolution * 1e9
    # The shortest, because this process may be interrupted at any of them.
    stamps = [time.monotonic_ns() for _ in range(1000)]
    steps = [after - before for before, after in pairwise(stamps)]
    finest = max(resolution, min((step for step in steps if step > 0), default=0))
    if finest > FINEST_NS:
        what = f"{finest:.0f} ns apart at best: a profile will be that coarse"
        return Finding(name, "warning", what, f"cat {SOURCES}/available_clocksource")
    return Finding(name, "ok", f"{finest:.0f} ns apart")
