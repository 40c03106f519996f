"""What one rank can say of its own steps at once, without the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from lightning_dist.profiling.analysis.breakdown import exposed_in
from lightning_dist.profiling.analysis.intervals import difference, length, union
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.whatif.setting import DDP

_MS, _MB = 1e6, 1e6
_OF_ERRORS = {
    "err_rel_l2": "relative_l2",
    "err_cos": "cosine",
    "ef_norm_ratio": "residual_ratio",
}


def of_one_rank(record: StepRecord) -> dict[str, float]:
    """Metrics by name, of a step that was recorded in detail; empty if nothing was exchanged.

    What is exposed is what it is in a summary. Waiting for others is part of it here: to tell it
    apart takes the other ranks. Stock DDP has no codec, and no time of one.
    """
    if not (record.detailed and record.buckets and record.duration):
        return {}
    window = exposed_in(record)
    exposed = length(window)
    exchanges = union((s.begin, s.end) for s in record.spans if s.phase == "exchange")
    raw = sum(bucket.raw for bucket in record.buckets)
    wire = sum(bucket.intra + bucket.inter for bucket in record.buckets)
    found = {
        "step_ms": record.duration / _MS,
        "exposed_ms": exposed / _MS,
        "exposed_pct": 100 * exposed / record.duration,
        "hidden_ms": length(difference(exchanges, window)) / _MS,
        "raw_mb": raw / _MB,
        "wire_mb": wire / _MB,
        "ratio": raw / wire if wire else 1.0,
        "profiler_overhead_pct": 100 * record.overhead / record.duration,
    }
    if any(bucket.codec != DDP for bucket in record.buckets):
        codec = sum(s.end - s.begin for s in record.spans if s.phase != "exchange")
        found["codec_ms"] = codec / _MS
    return found


def of_errors(errors: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics by name, of compression errors by field: medians, without what no error has."""
    values: dict[str, list[float]] = {name: [] for name in _OF_ERRORS}
    for error in errors:
        for name, field in _OF_ERRORS.items():
            if error[field] is not None:
                values[name].append(error[field])
    return {name: median(found) for name, found in values.items() if found}
