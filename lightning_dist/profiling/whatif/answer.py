"""Predictions for a run and for others like it. Types only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
LABEL = "PREDICTION, not measured"
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
        place: 1 for the best with the same link and hosts; those that the model cannot tell apart
            share one. None: not ranked.
        verdict: in words; empty where ``change`` says it.
        source: of the codec's cost.
        assumes: condition of the prediction.
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
    place: int | None = None
    verdict: str = ""
    source: str = ""
    assumes: str = ""
    reason: str = ""
    bucket_mb: float | None = None


def is_faster(each: Prediction) -> bool:
    """Faster than the run's own scenario by more than the error of the model."""
    return each.change is not None and each.change < 0 and each.verdict != NO_DIFFERENCE


@dataclass(frozen=True)
class WhatIf:
    """Predictions for a run and for others like it.

    Args:
        measured_ms: median step of the run.
        current: prediction for that very run.
        error: of ``current`` against ``measured_ms``, -0.1: a tenth too short; None: no prediction.
        margin: share of a step within which nothing is ranked.
        others: by links and hosts the best first; those without a prediction last.
        link: measured speed of the links.
        reasons: figures that are not known, and why.
        against: reference of ``change``, in words.
    """

    measured_ms: float
    current: Prediction
    error: float | None
    margin: float | None
    others: Sequence[Prediction]
    link: Mapping[str, float | None]
    reasons: Mapping[str, str] = field(default_factory=dict)
    label: str = LABEL
    against: str = THIS_RUN

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, **asdict(self)}
