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
    """A metric, or a column of a table.

    Args:
        key: name in ``summary.json``.
        unit: as :func:`format_value` takes it; :data:`TEXT` for a column without numbers.
        meaning: definition, as the report prints it.
    """

    key: str
    label: str
    unit: str = ""
    meaning: str = ""


METRICS: Mapping[str, Metric] = {
    each.key: each
    for each in (
        # Parts of a step, in the order in which they are drawn.
        Metric(
            "data",
            "data, callbacks",
            "ms",
            "until the next forward pass begins: waiting for its batch, and what the loop does "
            "after a step, such as callbacks, loggers and checkpoints",
        ),
        Metric("forward", "forward", "ms", "forward pass and loss"),
        Metric(
            "backward",
            "backward",
            "ms",
            "computing gradients; communication hidden under it costs no time and is included",
        ),
        Metric(
            "wait",
            "exposed wait",
            "ms",
            "local gradients are complete, and another rank has not launched the collective yet",
        ),
        Metric(
            "transfer",
            "exposed transfer",
            "ms",
            "all ranks have launched the collective, and it is in flight",
        ),
        Metric(
            "codec", "exposed codec", "ms", "encoding and decoding while no collective is in flight"
        ),
        Metric(
            "unattributed",
            "exposed unattributed",
            "ms",
            "exposed communication that is none of the three above",
        ),
        Metric(
            "optimizer",
            "optimizer",
            "ms",
            "from the averaged gradients to the end of the step: clipping, callbacks before the "
            "step, updating the parameters",
        ),
        Metric("other", "other", "ms", "time of the step in none of the parts above; usually none"),
        # The run.
        Metric(
            "step_ms",
            "step",
            "ms",
            "From the end of one optimizer step to the end of the next. Validation belongs to no "
            "step. Parts and shares are means over ranks and detailed steps, in which every "
            "collective was recorded; step times are of all steps.",
        ),
        Metric(
            "exposed_ms",
            "exposed",
            "ms",
            "Communication that compute does not hide: from the last gradient of the backward pass "
            "to the mean of all gradients. The sum of exposed wait, transfer, codec and "
            "unattributed.",
        ),
        Metric("exposed", "exposed communication", "%", "Exposed time as a share of the step."),
        Metric(
            "overlap",
            "overlap",
            "%",
            "Share of the time with a collective in flight that lies before the last gradient and "
            "is thereby hidden under the backward pass.",
        ),
        Metric(
            "traffic",
            "bytes sent",
            "B",
            "Bytes a rank sent per step. The compression ratio is the bytes of uncompressed DDP "
            "over these. 1 MB is a million bytes, 1 Gbit/s a billion bits per second.",
        ),
        Metric(
            "traffic.wire_gbps",
            "wire bandwidth",
            "Gbit/s",
            "Bits sent while collectives were in flight, waiting excluded: of a host to other "
            "hosts, or of a rank where there is one host. Comparable with the link.",
        ),
        Metric(
            "traffic.effective_gbps",
            "effective bandwidth",
            "Gbit/s",
            "Bus bandwidth that uncompressed DDP would need to take the same time.",
        ),
        Metric(
            "traffic.peak_gbps",
            "link bandwidth",
            "Gbit/s",
            "The highest rate measured on the idle link, not what the hardware promises.",
        ),
        Metric(
            "straggler",
            "straggler",
            "",
            "The rank that two thirds of the waiting is for, in more steps than chance would give, "
            "and by more than the clock uncertainty.",
        ),
        Metric("steps", "steps"),
        Metric("overhead", "profiler overhead", "%", "Time the profiler took, measured by itself."),
        # Ranks and buckets.
        Metric("rank", "rank"),
        Metric("host", "host", TEXT),
        Metric(
            "wait_ms",
            "wait",
            "ms",
            "Time from the launch of a collective on this rank to its launch on the last rank, "
            "hidden or not.",
        ),
        Metric(
            "caused_ms",
            "waited for",
            "ms",
            "Time the other ranks waited for this one, summed over them, hidden or not.",
        ),
        Metric(
            "clock_uncertainty_ms",
            "clock uncertainty",
            "ms",
            "Largest error of a rank's clock against that of rank 0, which is the reference.",
        ),
        Metric("intra_gbps", "inside its host", "Gbit/s"),
        Metric("inter_gbps", "to other hosts", "Gbit/s"),
        Metric("index", "bucket"),
        Metric("codec_name", "codec", TEXT),
        Metric("raw_mb", "raw", "MB"),
        Metric("wire_mb", "wire", "MB"),
        Metric("ready_ms", "ready", "ms"),
        Metric("encode_ms", "encode", "ms"),
        Metric("transfer_ms", "transfer", "ms"),
        Metric("decode_ms", "decode", "ms"),
        Metric("end_ms", "end after last gradient", "ms"),
        # Compression error.
        Metric(
            "relative_l2",
            "relative error",
            "",
            "|p - C(p)| / |p|: p is what a rank encoded (gradient and residual), C(p) what its "
            "payload says. Of one bucket per step in turn, on a random sample of its elements.",
        ),
        Metric("cosine", "cosine", "", "Cosine of the angle between p and C(p)."),
        Metric(
            "residual_ratio",
            "residual ratio",
            "",
            "Norm of the residual after the step over that of the gradient. If it keeps growing, "
            "the codec loses too much.",
        ),
        # Predictions.
        Metric("place", "position"),
        Metric("setting", "setting", TEXT),
        Metric("sent_mb", "sent", "MB"),
        Metric("change", "change"),
        Metric("remark", "remark", TEXT),
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
        unit: ``"%"`` of a share from 0 to 1, ``"B"`` and ``"Gbit/s"`` choose their prefix, any
            other is appended.
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
            (each for each in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if value >= each[0]),
            (1, "bytes"),
        )
        value /= size
    elif unit == "Gbit/s" and value < 1:
        value, unit = 1e3 * value, "Mbit/s"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    if size >= 0.001:
        return f"{value:#.3g}"
    return f"{value:.1g}" if size else "0"


def count(number: int, what: str) -> str:
    """Such as ``1 step`` and ``2 steps``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def why(reasons: Mapping[str, str], *keys: str) -> str:
    """The reason of the first of these keys that has one."""
    return next((reasons[key] for key in keys if key in reasons), "no reason was recorded")
