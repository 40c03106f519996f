"""Predictions for a run and for others like it. Types only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 2
LABEL = "Predicted step time (simulated)"
THIS_RUN = "this run"
NO_DIFFERENCE = "no difference that the model could tell"
NO_ERROR = "the model has no error to be judged by"


@dataclass(frozen=True)
class Prediction:
    """Predicted step of one scenario, in milliseconds; None with a ``reason`` where unknown.

    Args:
        gbps: of the link between hosts, headers included.
        exposed_ms: from the last gradient to the mean of all.
        sent_mb: over the link of a host.
        change: of the step against the run's own codec, form and buckets with the same link and
            hosts, as predicted; -0.5: half as long.
        position: 1 for the fastest with the same link and hosts; settings closer than the tolerance
            share one. None: not ranked.
        verdict: in words; empty where ``change`` says it.
        source: of the codec's cost.
        assumption: condition of the prediction; empty if there is none. Not ranked with one.
        bucket_mb: ``bucket_cap_mb`` of DDP; None: the buckets of the run.
    """

    codec: str
    form: str
    hosts: int
    world_size: int
    gbps: float
    step_ms: float | None = None
    exposed_ms: float | None = None
    sent_mb: float | None = None
    change: float | None = None
    position: int | None = None
    verdict: str = ""
    source: str = ""
    assumption: str = ""
    reason: str = ""
    bucket_mb: float | None = None


def is_faster(each: Prediction) -> bool:
    """Faster than the run's own scenario by more than the error of the model."""
    return each.change is not None and each.change < 0 and each.verdict != NO_DIFFERENCE


@dataclass(frozen=True)
class Predictions:
    """Predictions for a run and for others like it.

    Args:
        measured_ms: median step of the run.
        baseline: prediction for the run itself.
        error: of ``baseline``, -0.1: a tenth shorter than measured; None: no prediction.
        tolerance: share of a step; settings that differ by less are not ranked.
        scenarios: by links and hosts the fastest first; those without a prediction last.
        link: measured speed of the links.
        reasons: figures that are not known, and why.
        change_baseline: reference of ``change``, in words.
    """

    measured_ms: float
    baseline: Prediction
    error: float | None
    tolerance: float | None
    scenarios: Sequence[Prediction]
    link: Mapping[str, float | None]
    reasons: Mapping[str, str] = field(default_factory=dict)
    label: str = LABEL
    change_baseline: str = THIS_RUN

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, **asdict(self)}
