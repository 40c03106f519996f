"""Predicted step times of a run and of other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 2
LABEL = "Predicted step time (simulated)"


@dataclass(frozen=True)
class Prediction:
    """Predicted step of one scenario, in milliseconds; None with a ``reason`` where unknown.

    Args:
        gbps: of the link between hosts, headers included.
        exposed_ms: from the last gradient to the mean of all; in all collectives of a model that is
            sharded over all ranks.
        sent_mb: over the link of a host.
        change: of the step against the run's own codec and form with the same link and hosts, as
            predicted; -0.5: half as long.
        position: 1 for the fastest; settings closer than the tolerance share one. None: not ranked.
        source: of the codec's cost.
        assumption: condition of the prediction, which is not ranked then; empty: none.
        sync_every: local steps between two exchanges; times and bytes are means of a step. 0:
            gradients are exchanged in every step.
        fragments, overlap_steps: of local steps, as of ``Scenario``.
        parameters: codec of the parameters, as of ``Scenario``.
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
    source: str = ""
    assumption: str = ""
    reason: str = ""
    sync_every: int = 0
    fragments: int = 1
    overlap_steps: int = 0
    parameters: str = ""

    @property
    def exposed_share(self) -> float | None:
        """Share of a step's time in which it waits for the exchange."""
        if self.step_ms is None or self.exposed_ms is None:
            return None
        return self.exposed_ms / self.step_ms


@dataclass(frozen=True)
class Predictions:
    """Predictions for a run and for other settings on the same links and hosts.

    Args:
        measured_ms: median step of the run.
        baseline: prediction for the run itself; ``error``: of it, -0.1: a tenth shorter than
            measured.
        tolerance: share of a step; settings that differ by less are not ranked.
        scenarios: the fastest first; those without a prediction last.
        link: measured speed of the links.
        unavailable: figures that are not known, and why.
    """

    measured_ms: float
    baseline: Prediction
    error: float
    tolerance: float
    scenarios: Sequence[Prediction]
    link: Mapping[str, float | None]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    label: str = LABEL

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    def is_faster(self, each: Prediction) -> bool:
        """Faster than the run's own setting by more than the tolerance."""
        return each.change is not None and each.change < -self.tolerance
