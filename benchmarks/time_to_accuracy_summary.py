"""From the curves of the time-to-accuracy benchmark to its rows, and from the rows to its table.

What the columns mean is in `benchmarks/time_to_accuracy.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, mean, median
from typing import Any

from benchmarks.report import print_table
from benchmarks.time_to_accuracy_settings import BASELINES, COMPUTE_ROW, DDP_ROW, FP16_ROW, smoothed

Row = dict[str, Any]
_TO_TARGET = ("steps_to_target", "seconds_to_target", "wire_bytes_to_target")
_MEASURED = ("step_ms", "wire_bytes_per_step", *_TO_TARGET, "replicas_identical")


def summarize(of_seed: Mapping[int, Mapping[str, Any]], *, rows: Sequence[str]) -> list[Row]:
    """One row of the JSON for every row; the results of each seed are kept beside the means."""
    result = [_row(name, of_seed) for name in rows]
    for row in result:
        row["speedup_vs_fp32"] = _speedup(row, result, DDP_ROW)
        row["speedup_vs_fp16"] = _speedup(row, result, FP16_ROW)
    return result


def communication_share(rows: Sequence[Row]) -> float:
    """Percent of fp32 DDP's median step that is not there without communication."""
    step_ms = {row["row"]: row["step_ms"] for row in rows}
    return 100 * (1 - step_ms[COMPUTE_ROW] / step_ms[DDP_ROW])


def best(rows: Sequence[Row]) -> Row | None:
    """Ours with the largest speed-up; None if none reached the target with all seeds."""
    ours = [row for row in rows if row["row"] not in BASELINES and row["speedup_vs_fp32"]]
    return max(ours, key=lambda row: row["speedup_vs_fp32"], default=None)


def show(rows: Sequence[Row], *, title: str) -> None:
    """The table; a dash in the columns of the target: not reached with every seed."""
    print_table(
        title,
        columns=(
            "row", "step ms", "MB a step", "steps to target", "s to target", "MB to target",
            "x fp32", "x fp16", "identical",
        ),
        rows=[
            (
                row["row"],
                row["step_ms"],
                _megabytes(row["wire_bytes_per_step"]),
                row["steps_to_target"],
                row["seconds_to_target"],
                _megabytes(row["wire_bytes_to_target"]),
                _times(row["speedup_vs_fp32"]),
                _times(row["speedup_vs_fp16"]),
                {True: "yes", False: "NO", None: None}[row["replicas_identical"]],
            )
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        if row["reason"]:
            print(f"  {row['row']}: {row['reason']}")


def _row(name: str, of_seed: Mapping[int, Mapping[str, Any]]) -> Row:
    refused = [seed["refused"][name] for seed in of_seed.values() if name in seed["refused"]]
    if refused:
        return {"row": name, "reason": refused[0], **dict.fromkeys(_MEASURED), "runs": []}
    runs = []
    for number, seed in of_seed.items():
        of_row = seed["rows"][name]
        there = _to_target(of_row["curve"], seed["target"])
        runs.append({"seed": number, "target_loss": seed["target"], **there, **of_row})
    identical = all(run["replicas_identical"] for run in runs)
    return {
        "row": name,
        "reason": None,
        "step_ms": 1e3 * median(s for run in runs for s in _step_s(run["curve"])),
        "wire_bytes_per_step": mean(_per_step(run["curve"]) for run in runs),
        **{key: _mean([run[key] for run in runs]) for key in _TO_TARGET},
        "replicas_identical": None if name == COMPUTE_ROW else identical,
        "runs": runs,
    }


def _to_target(curve: Sequence[Mapping[str, Any]], target: float) -> Row:
    """The first evaluation at which the loss was as low as the target."""
    losses = [] if curve[-1]["val_loss"] is None else smoothed([p["val_loss"] for p in curve])
    pairs = zip(curve, losses, strict=False)
    there = next((point for point, loss in pairs if loss <= target), None) or {}
    return {
        "steps_to_target": there.get("step"),
        "seconds_to_target": there.get("seconds"),
        "wire_bytes_to_target": there.get("tx_bytes"),
    }


def _step_s(curve: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of a step, from every block but the first, in which buffers are made."""
    pairs = itertools.pairwise(curve)
    return [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairs]


def _per_step(curve: Sequence[Mapping[str, Any]]) -> float:
    last = curve[-1]
    return float(last["tx_bytes"] / last["step"])


def _speedup(row: Row, rows: Sequence[Row], reference: str) -> float | None:
    """The geometric mean over seeds of the reference's seconds by this row's."""
    theirs = next(r for r in rows if r["row"] == reference)["runs"]
    pairs = [
        (other["seconds_to_target"], mine["seconds_to_target"])
        for other, mine in zip(theirs, row["runs"], strict=False)
    ]
    if not pairs or None in [value for pair in pairs for value in pair]:
        return None
    return geometric_mean([other / mine for other, mine in pairs])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _megabytes(count: float | None) -> str | None:
    return None if count is None else f"{count / 1e6:.2f}"


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"
