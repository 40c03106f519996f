"""From the samples of the step-time benchmarks to their rows, and from the rows to a table.

The columns are explained in `allreduce.py` and `hierarchical.py`.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.launch import Layout
from benchmarks.harness.tables import Column, of_link, show
from benchmarks.step_time.rows import COMPUTE_ROW, DDP_ROW, FP16_ROW, GRADIENT_BYTES, split_row

Samples = dict[str, list[dict[str, Any]]]
JsonRow = dict[str, Any]


def summarize(
    samples_of: Samples, *, layout: Layout, link_mbit: float | None, reasons: dict[str, str]
) -> list[JsonRow]:
    """The samples of one link as rows of the JSON, one per row measured.

    reasons: the rows that could not be measured, and why not. Bytes are those of the host that
    sends most, divided by the mean number of ranks: no share of a host with fewer or more ranks.
    """
    steps_ms = {
        name: [sample["step_s"] * 1e3 for sample in samples] for name, samples in samples_of.items()
    }
    medians = {name: median(steps) for name, steps in steps_ms.items()}
    known = {
        "hosts": layout.hosts,
        "ranks_per_host": layout.ranks_per_host,
        "layout": layout.name,
        "link_mbit": link_mbit,
    }
    rows = []
    for name, samples in samples_of.items():
        form, codec = split_row(name)
        step_ms, silent, last = medians[name], name == COMPUTE_ROW, samples[-1]
        added_ms = step_ms - medians[COMPUTE_ROW]
        sent = zip(*(sample["tx_bytes"] for sample in samples), strict=True)
        host_bytes = max(median(of_host) for of_host in sent)
        raw_bytes, inter_bytes = last["raw_bytes"], last["inter_bytes"]
        if inter_bytes is None:  # torch's: an allreduce, or nothing
            world = layout.world_size
            raw_bytes = 0 if silent else round(GRADIENT_BYTES * 2 * (world - 1) / world)
        limit_pct = bound_ms = None
        if link_mbit is not None and not silent:
            wire_ms = host_bytes * 8 / (link_mbit * 1e3)
            bound_ms = step_ms - added_ms + wire_ms
            limit_pct = wire_ms / added_ms * 100 if added_ms > 0 else None
        ranks = layout.world_size / layout.hosts
        rows.append(
            {
                "codec": codec,
                "form": form,
                **known,
                "rounds": len(samples),
                "step_ms_median": step_ms,
                "step_ms_p10": float(np.quantile(steps_ms[name], 0.1)),
                "step_ms_p90": float(np.quantile(steps_ms[name], 0.9)),
                "wire_bytes": round(host_bytes / ranks),
                "counted_wire_bytes": inter_bytes and round(max(inter_bytes) / ranks),
                "raw_bytes": raw_bytes,
                # Of host 0, in the last step: our counters say the same in every one.
                "inter_bytes": inter_bytes and inter_bytes[0],
                "intra_bytes": last["intra_bytes"] and last["intra_bytes"][0],
                "lo_bytes": round(median(sample["lo_bytes"] for sample in samples)),
                "wire_limit_pct": limit_pct,
                "bound_ms": bound_ms,
                "speedup_vs_fp32": medians[DDP_ROW] / step_ms,
                "speedup_vs_fp16": medians[FP16_ROW] / step_ms,
                "replicas_identical": None if silent else all(s["identical"] for s in samples),
                "reason": None,
            }
        )
    for name, reason in reasons.items():
        form, codec = split_row(name)
        unknown = dict.fromkeys(rows[0])
        rows.append({**unknown, **known, "codec": codec, "form": form, "reason": reason})
    return rows


def show_link(rows: list[JsonRow]) -> None:
    """The rows of one link as a table, then those that have a reason instead of figures."""
    measured = [row for row in rows if row["reason"] is None]
    first = measured[0]
    show(
        f"{first['layout']}, {of_link(first['link_mbit'])}, {first['rounds']} rounds; MB a step: "
        "a rank to other hosts (interface), then of host 0 by our counters and its loopback",
        _COLUMNS,
        measured,
    )
    for row in rows:
        if row["reason"] is not None:
            print(f"{row['form'] or ''} {row['codec']}: {row['reason']}".strip())


_COLUMNS: list[Column] = [
    ("codec", "{codec}"),
    ("form", "{form}"),
    ("step ms", "{step_ms_median:,.1f}"),
    ("p10", "{step_ms_p10:,.1f}"),
    ("p90", "{step_ms_p90:,.1f}"),
    ("wire MB", "{wire_bytes!b}"),
    ("inter MB", "{inter_bytes!b}"),
    ("intra MB", "{intra_bytes!b}"),
    ("lo MB", "{lo_bytes!b}"),
    ("% of wire", "{wire_limit_pct:,.1f}"),
    ("bound ms", "{bound_ms:,.1f}"),
    ("x fp32", "{speedup_vs_fp32:.2f}"),
    ("x fp16", "{speedup_vs_fp16:.2f}"),
    ("identical", "{replicas_identical!y}"),
]
