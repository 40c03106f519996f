"""Planted runs for predictions, and what codecs cost in them."""

from __future__ import annotations

from typing import Any

from planted import MS, Planted, replace, replaced

from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.capture.events import BurstRecord
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import predict
from lightning_dist.profiling.whatif.predictions import Prediction, Predictions
from lightning_dist.profiling.whatif.scenarios import elsewhere
from lightning_dist.reducer.units.sizes import UNIT_ELEMENTS

DDP = Planted(steps=8, codec="ddp", encode=0, decode=0, sent=4_000_000, transfer=40)
INT8 = replace(DDP, codec="int8", encode=1, decode=2, sent=1_000_000, transfer=10)
CHUNK = replace(INT8, raw=4 * UNIT_ELEMENTS, sent=UNIT_ELEMENTS)
"""Buckets of one chunk each, as planted ones are; larger ones overlap with themselves."""

COSTS = {
    # of a bucket of a million elements 1 ms and, with two payloads, 2 ms
    "int8": CodecCost("int8", "two_shot", 1.0, encode=1e-9, decode=5e-10, store=1e-9),
    "fp16": CodecCost("fp16", "allreduce", 2.0, encode=0.0, decode=0.0, store=0.0, source="here"),
    "none": CodecCost("none", "allreduce", 4.0, encode=0.0, decode=0.0, store=0.0),
}


def asked(of: Planted | Run, *changes: dict[str, Any], **place: Any) -> Predictions:
    """Predictions of the run with ``changes``, on the links and hosts of ``place``."""
    observed = observe(of.run() if isinstance(of, Planted) else of)
    there = elsewhere(observed.scenario, **place)
    return predict(observed, [replace(there, **each) for each in changes], costs=COSTS)


def only(of: Planted | Run, change: dict[str, Any] | None = None, **place: Any) -> Prediction:
    """The one prediction of :func:`asked`."""
    (found,) = asked(of, change or {}, **place).scenarios
    return found


def duration(planted: Planted) -> float:
    return planted.run().ranks[0].steps[4].duration / MS


def about(run: Run, **changes: object) -> Run:
    """``run``, where all ranks say something else of themselves."""
    for rank, each in run.ranks.items():
        run = replaced(run, rank, metadata=replace(each.metadata, **changes))
    return run


def with_bursts(run: Run, latency_ms: float) -> Run:
    """Small collectives were measured before the first step."""
    bursts = [
        BurstRecord("flat", "all_gather", 4096, count, seconds=latency_ms / 1e3 * each, cpu=0.0)
        for count, each in ((1, 1), (16, 0))
    ]
    return replaced(run, 1, bursts=bursts)
