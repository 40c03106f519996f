"""What is predicted of a run and of others like it. Types only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1

LABEL = "PREDICTION, not measured"

NO_DIFFERENCE = "no difference that the model could tell"

THIS_RUN = "this run"

NO_ERROR = "the model has no error to be judged by"


@dataclass(frozen=True)
class Prediction:
    """One setting. Milliseconds of a step; a figure that cannot be told is None, see ``reason``.

    Args:
        gbps: of the link between hosts, headers included.
        exposed_ms: from the last gradient to the mean of all.
        sent_mb: over the link of a host.
        change: of the step against the prediction for the run's own setting, -0.5: half as long.
            Where other links, latencies or numbers of hosts are asked about: with the same.
        place: 1 for the best with the same link and hosts; those that the model cannot tell apart
            share one. None: not ranked.
        verdict: in words; empty where ``change`` says it.
        source: where the cost of the codec is from.
        assumes: what has to be so.
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
    """Than the run's own setting, by more than the model can be wrong."""
    return each.change is not None and each.change < 0 and each.verdict != NO_DIFFERENCE


@dataclass(frozen=True)
class WhatIf:
    """What can be said of a run and of others like it.

    Args:
        measured_ms: median step of the run.
        current: the model's word on that very run.
        error: of it against ``measured_ms``, -0.1: a tenth too short; None: no prediction.
        margin: share of a step within which nothing is ranked.
        others: the best first, by links and hosts where these are asked about; then what is not
            ranked, then those of which nothing can be told.
        link: what was measured of the links.
        reasons: by name, what is not known, and why.
        against: what ``change`` is against, in words.
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
