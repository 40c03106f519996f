"""Differences of two runs, and how much of them the spread of their steps explains.

Of medians over steps. Each has the interval of a notched box plot, 1.58 quartile distances by the
root of the number of steps to both sides; a difference that is not larger than both together is
what two runs of the same may show. Neighbouring steps are not wholly independent, so a difference
just above it may still be chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightning_dist.profiling.analysis.metrics import METRICS, format_value, why
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS, Summary
from lightning_dist.profiling.analysis.tables import sample
from lightning_dist.profiling.run import Run

_NOTCH = 1.58
_FEWEST = 6
"""Steps of a run below which their quartiles say nothing."""

NAMES = ("step_ms", *(f"{part}_ms" for part in PARTS), "exposed_ms", "sent_mb", "all_steps_ms")
"""Figures that are compared: parts are means over ranks, ``sent_mb`` is of a rank. All but
``all_steps_ms`` are of the steps that were recorded in detail, as they are in a report."""


Figures: TypeAlias = Mapping[str, Sequence[float] | str]
"""Figures of a run by name: a value for every step, or why there is none."""


@dataclass(frozen=True)
class Difference:
    """One line of a comparison: medians over steps, and ``b - a``; None: see ``reason``.

    Args:
        spread: how much of ``b - a`` the spread of the steps can explain; None: too few steps.
        is_explained: the spread alone can explain the difference; None: not known.
    """

    name: str
    a: float | None
    b: float | None
    difference: float | None = None
    spread: float | None = None
    is_explained: bool | None = None
    reason: str = ""


def measured(run: Run, summary: Summary) -> Figures:
    """Figures of a run that can be compared."""
    per_step, parts = summary.per_step, summary.per_step.breakdown_ms
    exposed = [parts[name] for name in EXPOSED if name in parts and summary.exposed_ms is not None]
    values: dict[str, Sequence[float]] = {
        "step_ms": per_step.step_ms,
        **{f"{part}_ms": parts.get(part, ()) for part in PARTS},
        "exposed_ms": np.sum(exposed, axis=0).tolist() if exposed else (),
        "sent_mb": per_step.sent_mb if summary.traffic else (),
        "all_steps_ms": sample(run, warmup_steps=summary.warmup_steps).durations_ms(),
    }
    fields = {"step_ms": "step_ms", "exposed_ms": "exposed_ms", "sent_mb": "traffic"}
    return {
        name: steps
        or why(summary.unavailable, fields.get(name, name.removesuffix("_ms")), "breakdown_ms")
        for name, steps in values.items()
    }


def compare(a: Figures, b: Figures) -> list[Difference]:
    """Everything of :data:`NAMES`, in that order."""
    return [_difference(name, a, b) for name in NAMES]


def verdict(differences: Sequence[Difference]) -> str:
    """The differences in a sentence."""
    step = differences[0]
    assert step.name == "step_ms"
    if step.difference is None or step.is_explained is None:
        return f"The steps cannot be compared: {step.reason}."
    unlike = [line for line in differences[1:] if line.is_explained is False]
    others = _largest(unlike, 0.0 if step.is_explained else step.difference)
    if step.is_explained:
        nothing = "no difference beyond the spread of the steps"
        return f"Step time: {nothing}; but {others}." if others else f"There is {nothing}."
    share = f" ({format_value(abs(step.difference) / step.a, '%')})" if step.a else ""
    word = "longer" if step.difference > 0 else "shorter"
    because = f": {others}" if others else "; no single part explains it"
    return f"The step of B is {format_value(abs(step.difference), 'ms')}{share} {word}{because}."


def _largest(differences: Sequence[Difference], of_step: float) -> str:
    """The three parts that differ most, in words; without any, what is sent.

    Parts that changed in the direction of the step come first: they explain it.
    """
    signed = [(line.name.rpartition("_")[0], line.difference or 0.0) for line in differences]

    def text(label: str, value: float, unit: str) -> str:
        return f"{label} {format_value(value, unit, signed=True)}"

    parts = [figure for figure in signed if figure[0] in PARTS]
    if parts:
        parts.sort(key=lambda figure: (figure[1] * of_step <= 0, -abs(figure[1])))
        return ", ".join(text(METRICS[name].label, value, "ms") for name, value in parts[:3])
    return ", ".join(text(name, value, "MB") for name, value in signed if name == "sent")


def _difference(name: str, a: Figures, b: Figures) -> Difference:
    of_runs = {"A": a.get(name, ""), "B": b.get(name, "")}
    known = [values for values in of_runs.values() if not isinstance(values, str)]
    if len(known) < len(of_runs):
        first, second = (
            None if isinstance(steps, str) else statistics.median(steps)
            for steps in of_runs.values()
        )
        texts = {run: reason for run, reason in of_runs.items() if isinstance(reason, str)}
        reasons = (f"{run}: {reason}" for run, reason in texts.items() if reason)
        return Difference(name, first, second, reason="; ".join(reasons))
    of_a, of_b = map(statistics.median, known)
    if (fewest := min(map(len, known))) < _FEWEST:
        reason = f"the spread of {fewest} steps is not enough, {_FEWEST} are needed"
        return Difference(name, of_a, of_b, of_b - of_a, reason=reason)
    spread = sum(map(_notch, known))
    is_explained = abs(of_b - of_a) <= spread or math.isclose(of_a, of_b)
    return Difference(name, of_a, of_b, of_b - of_a, spread, is_explained)


def _notch(values: Sequence[float]) -> float:
    low, high = np.quantile(values, (0.25, 0.75))
    return float(_NOTCH * (high - low) / math.sqrt(len(values)))
