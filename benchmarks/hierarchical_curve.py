"""What the model of `benchmarks/hierarchical_model.py` says of numbers of hosts nobody measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.hierarchical_cost import PLAIN, facts_of, work
from benchmarks.hierarchical_fit import ELEMENTS, INTRA_BYTE, ROUND, Model, extended, predict, terms
from benchmarks.hierarchical_settings import FLAT, LEADER, SHARDED
from benchmarks.layouts import Layout
from benchmarks.report import print_table

LABEL = "PREDICTION, not measured: extrapolated from 2 to 4 hosts on one machine"
HOSTS = tuple(2**power for power in range(1, 11))
LINES = (
    (FLAT, "none"),
    (FLAT, "int4"),
    (SHARDED, "none"),
    (SHARDED, "int8"),
    (SHARDED, "int4"),
    (SHARDED, "bf16+int4"),
    (LEADER, "int4"),
)
"""The form and codec of every line; the first is what the others are compared with."""


def curve(
    model: Model,
    *,
    ranks_per_host: int = 8,
    gbit: float = 10.0,
    intra_gbit: float | None = None,
    latency_us: float | None = None,
    hosts: Sequence[int] = HOSTS,
) -> list[dict[str, Any]]:
    """A row for every number of hosts and line whose codecs were measured; each rank has a core.

    intra_gbit, latency_us: instead of the fitted rate within hosts and round between them.
    """
    given = {}
    if intra_gbit is not None:
        given[INTRA_BYTE] = 8 / (intra_gbit * 1e9)
    if latency_us is not None:
        given[ROUND] = latency_us / 1e6
    used = extended(model, link_mbit=gbit * 1e3)
    used = replace(used, coefficients={**used.coefficients, **given})
    rows = []
    for count in hosts:
        layout = Layout.of(ranks_per_host, hosts=count)
        plain_s = predict(used, _terms(FLAT, PLAIN.name, layout, gbit=gbit))
        for form, codec in LINES:
            of = _terms(form, codec, layout, gbit=gbit)
            try:
                seconds = predict(used, of)
            except KeyError:  # no row of that codec was measured
                continue
            rows.append(
                {
                    "kind": "prediction",
                    "label": LABEL,
                    "hosts": count,
                    "ranks_per_host": ranks_per_host,
                    "gbit": gbit,
                    "form": form,
                    "codec": codec,
                    "predicted_ms": seconds * 1e3,
                    "round_us": used.coefficients[ROUND] * 1e6,
                    "round_given": latency_us is not None,
                    "rounds_ms": of[ROUND] * used.coefficients[ROUND] * 1e3,
                    "speedup_vs_flat_fp32": plain_s / seconds,
                }
            )
    return rows


def show_curve(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for every number of hosts."""
    lines = _lines(rows)
    by_place = {(row["hosts"], row["form"], row["codec"]): row for row in rows}
    first = rows[0]
    print_table(
        f"{LABEL}\n{ELEMENTS * 4 / 1e6:.0f} MB of gradients, {first['ranks_per_host']} ranks per "
        f"host, {first['gbit']:g} Gbit/s per host: ms of communication, and times flat none",
        columns=("hosts", *(f"{form} {codec}" for form, codec in lines)),
        rows=(
            (count, *(_cell(by_place[count, form, codec]) for form, codec in lines))
            for count in dict.fromkeys(row["hosts"] for row in rows)
        ),
    )
    last = rows[-len(lines)]
    print(
        f"a round between hosts at {last['round_us']:,.0f} us "
        f"({'given' if last['round_given'] else 'fitted to few ranks on a busy machine'}): "
        f"{last['rounds_ms'] / last['predicted_ms']:.0%} of {last['form']} {last['codec']} on "
        f"{last['hosts']} hosts"
    )


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed-up over flat fp32 by the number of hosts, as a picture; exits without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("benchmarks/hierarchical_model.py: --plot needs matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for form, codec in _lines(rows):
        of = [row for row in rows if (row["form"], row["codec"]) == (form, codec)]
        axes.plot(
            [row["hosts"] for row in of],
            [row["speedup_vs_flat_fp32"] for row in of],
            marker="o",
            label=f"{form} {codec}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"hosts, {rows[0]['ranks_per_host']} ranks each, {rows[0]['gbit']:g} Gbit/s")
    axes.set_ylabel("communication of a step, times faster than flat fp32")
    axes.set_title(LABEL, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _terms(form: str, codec: str, layout: Layout, *, gbit: float) -> dict[str, float]:
    facts = facts_of(codec)
    assert facts is not None, f"{codec} has no fixed size per element"
    intra, inter = facts
    done = work(form, layout, inter=inter, intra=intra, elements=ELEMENTS)
    return terms(done, link_mbit=gbit * 1e3)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["form"], row["codec"]) for row in rows))


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['predicted_ms']:,.0f} ({row['speedup_vs_flat_fp32']:.1f}x)"
