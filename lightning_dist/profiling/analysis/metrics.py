"""Metrics of a profile: keys, labels, units and meanings, and how their values are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "n/a"
"""Text of a value that was not measured."""

TEXT = "text"
"""Unit of a column that holds no number."""


@dataclass(frozen=True)
class Metric:
    """A metric, or a column of a table; its unit as :func:`format_value` takes it, or ``TEXT``."""

    key: str
    label: str
    unit: str = ""
    meaning: str = ""


def metric(key: str, meaning: str = "", *, label: str = "", unit: str = "") -> Metric:
    """A metric; label and unit as the key says them, such as those of ``ready_ms``."""
    stem, _, suffix = key.rpartition("_")
    known = {"ms": "ms", "mb": "MB", "gbps": "Gbit/s"}.get(suffix, "")
    label = label or (stem if known else key).replace("_", " ")
    return Metric(key, label, unit or known, meaning)


MEANING_OF_PARTS = {  # in the order in which they are drawn
    "between_steps": "waiting for a batch, callbacks, loggers, checkpoints",
    "forward": "forward pass and loss",
    "backward": "backward pass, with the communication that is hidden under it",
    "exposed_wait": "gradients are complete, but another rank is late",
    "exposed_transfer": "all ranks have arrived, the collective is in flight",
    "exposed_codec": "encoding and decoding, with no collective in flight",
    "exposed_other": "exposed, but none of the three above",
    "optimizer": "clipping, callbacks before the step, updating the parameters",
    "other": "none of the parts above",
}
_OF_RUN = (
    metric(
        "step_ms",
        "From the end of one optimizer step to the end of the next. Validation belongs to no step. "
        "Step times are of all steps; all else is the mean over ranks and detailed steps, of which "
        "every collective was recorded.",
    ),
    metric(
        "exposed_ms",
        "Communication that compute does not hide: from the last gradient of the backward pass to "
        "the mean of all gradients, and where FSDP's own collectives hold up a pass.",
    ),
    metric(
        "exposed_fraction",
        "Exposed time over that of the step.",
        label="exposed communication",
        unit="%",
    ),
    metric(
        "overlap_fraction",
        "Share of the time with a collective in flight that is hidden under the backward pass.",
        label="overlap",
        unit="%",
    ),
    metric(
        "traffic",
        "Per step and rank. 1 MB is a million bytes, 1 Gbit/s a billion bits per second.",
        label="bytes sent",
        unit="B",
    ),
    metric(
        "traffic.wire_gbps",
        "Bits sent over the time with a collective in flight, without waiting: of a node to other "
        "nodes, or of a rank where there is one node.",
        label="wire bandwidth",
    ),
    metric(
        "traffic.ddp_equivalent_busbw_gbps",
        "Bus bandwidth at which uncompressed DDP would take the same time.",
        label="effective bandwidth",
    ),
    metric("traffic.link_gbps", "Highest rate measured on the idle link.", label="link bandwidth"),
    metric(
        "straggler",
        "The rank that two thirds of the waiting is for, in more steps than chance would give, and "
        "by more than the clock uncertainty.",
    ),
    metric("profiler_overhead", "Time the profiler took, as measured by itself.", unit="%"),
)
_OF_RANKS_AND_BUCKETS = (
    metric("node", unit=TEXT),
    metric(
        "wait_ms",
        "From the launch of a collective on this rank to that on the last, hidden or exposed.",
    ),
    metric("waited_for_ms", "Time for which the other ranks waited for this one."),
    metric("clock_uncertainty_ms", "Bound of a clock's error against that of rank 0."),
    metric("intra_gbps", label="inside its node"),
    metric("inter_gbps", label="to other nodes"),
    metric("bucket_codec", label="codec", unit=TEXT),
    metric(
        "relative_l2",
        "|p - C(p)| / |p| of p, what a rank encoded (gradient and residual), and C(p), what its "
        "payload decodes to: of one bucket in turn, on a random sample of its elements.",
        label="relative error",
    ),
    metric("cosine", "Cosine of the angle between p and C(p)."),
    metric(
        "residual_ratio",
        "Norm of the residual over that of the gradient. If it keeps growing, the codec loses too "
        "much.",
    ),
)
_WITHOUT_MEANING = (
    *("rank", "bucket", "raw_mb", "wire_mb", "ready_ms", "encode_ms", "transfer_ms", "decode_ms"),
    *("end_after_last_gradient_ms", "position", "sent_mb", "change"),
)
METRICS: Mapping[str, Metric] = {
    entry.key: entry
    for entry in (
        *(metric(name, meaning, unit="ms") for name, meaning in MEANING_OF_PARTS.items()),
        *_OF_RUN,
        *_OF_RANKS_AND_BUCKETS,
        *map(metric, _WITHOUT_MEANING),
        *(metric(name, unit=TEXT) for name in ("setting", "remark")),
    )
}


def finite(value: Any) -> float | None:
    """``value`` as a float; None if it is not a finite number."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def format_value(value: float | None, unit: str = "", *, signed: bool = False) -> str:
    """A number with three significant digits and its unit; ``"n/a"`` if it is not finite.

    Args:
        unit: ``"%"`` of a share from 0 to 1; ``"B"`` and ``"Gbit/s"`` choose their prefix.
    """
    value = finite(value)
    if value is None:
        return MISSING
    if unit == "%" and signed:
        return f"{100 * value:+z.1f} %"
    if unit == "%":
        value *= 100
        return f"{value:.0f} %" if abs(value) >= 10 else f"{float(f'{value:.2g}'):g} %"
    if unit == "B":
        size, unit = next(
            (prefix for prefix in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if value >= prefix[0]),
            (1, "bytes"),
        )
        value /= size
    elif unit == "Gbit/s" and value < 1:
        value, unit = 1e3 * value, "Mbit/s"
    sign = "+" if signed and value >= 0 else ""
    return f"{sign}{_digits(value)} {unit}".rstrip()


def in_ms(value: float | None) -> str:
    """A time, with its unit."""
    return format_value(value, "ms")


def _digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 0.001:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:z.1g}"


def count(number: int, what: str) -> str:
    """Such as ``1 step`` and ``2 steps``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def why(unavailable: Mapping[str, str], *keys: str) -> str:
    """The reason of the first of these keys that has one."""
    return next((unavailable[key] for key in keys if key in unavailable), "no reason was recorded")
