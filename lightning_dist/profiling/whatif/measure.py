"""Measures what codecs cost when a training is over, in the time that is fair for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.costs_file import MEASURES, Costs
from lightning_dist.profiling.whatif.observe import Observed
from lightning_dist.reducer.calibration import calibrate, to_measure
from lightning_dist.reducer.costs import CANDIDATES, CodecCost
from lightning_dist.reducer.fusing import should_fuse

LEAST_TRAINING = 30.0
"""Seconds: a shorter one is a trial, and nobody wants to wait at its end."""

LARGEST_SHARE = 0.1
"""Of the training, which measuring may take before it begins with no further codec."""

LONGEST = 30.0
"""Seconds of the same; a compiled codec takes up to 20 the first time."""


def runs_compiled(observed: Observed, wish: bool | Literal["auto"] = "auto") -> bool:
    """Whether gradients as large as those of a run get compiled kernels on a device like its own.

    Also those that nobody has compressed yet: a codec may be several times faster with them.

    Args:
        wish: ``compile_kernels`` of the run.
    """
    return should_fuse(wish, numel=round(observed.elements), device=torch.device(observed.device))


def measure_costs(
    run: Run,
    observed: Observed,
    *,
    fused: bool,
    device: torch.device,
    clock: Callable[[], float] = time.monotonic,
) -> Costs:
    """Of all candidates, the run's own codec first, or why there are none. Never raises.

    Args:
        fused: compile the kernels first, as :func:`runs_compiled` says.
        device: that has trained.
        clock: seconds.
    """
    trained = seconds_of(run)
    if trained < LEAST_TRAINING:
        return Costs(reason=f"the training was shorter than {LEAST_TRAINING:g} s; {MEASURES}")
    host = run.ranks[min(run.ranks)].about.host
    until = clock() + min(LONGEST, LARGEST_SHARE * trained)
    found: dict[str, CodecCost] = {}
    problems = []
    names = to_measure(CANDIDATES, observed.setting.codec)
    for number, name in enumerate(names):
        if number and clock() > until:
            problems.append(f"no time was left to measure {', '.join(names[number:])}; {MEASURES}")
            break
        try:
            where = f"on {host} after this run"
            found |= calibrate([name], fused=fused, where=where, device=device)
        except Exception as error:  # a training must not fail by what comes after it
            problems.append(f"measuring {name} failed: {type(error).__name__}: {error}")
    return Costs(found, "; ".join(problems))


def seconds_of(run: Run) -> float:
    """From the first step that is recorded to the end of the last, of the rank with the longest."""
    spans = []
    for each in run.ranks.values():
        if each.steps:  # of their heads: no line is read again for it
            first, last = each.head(min(each.steps)), each.head(max(each.steps))
            spans.append(last.begin + last.duration - first.begin)
    return max(spans, default=0) / 1e9
