"""Tables of the profiler: planted truths, rates, clocks, costs, predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness.tables import NA, Column, Row, Rows, Table, links_of, of_link, pivot


def _pair(row: Row) -> str:
    error = row["relative_error"]
    off = NA if error is None else f"{100 * error:+.0f} %"
    return f"{row['measured_ms']:,.0f} ms" + (" (the profile)" if row["is_base"] else f", {off}")


def _sizes(of: Mapping[str, float]) -> str:
    sizes = f"median {100 * of['median']:.1f} %, largest {100 * of['largest']:.1f} %."
    return f"{of['rows']:g} predictions: {sizes}"


def _errors_text(meta: Mapping[str, Any], rows: Rows) -> str:
    base, of, any_of = meta["base"], meta["errors"], meta["errors_from_any"]
    return (
        "A step as measured, medians, and by how much its prediction is off. All from one profile, "
        f"of `{base['setting']}` at {base['link_mbit']:g} Mbit/s, with costs of codecs and small "
        "collectives that were measured before the first step. 2 nodes of one rank with one core, "
        f"42 MB of gradients. Error over {_sizes(of)} From each of the {len(rows)} runs as the "
        f"profile, {_sizes(any_of)}"
    )


_MODELS = {"linear": "42 MB of gradients", "gpt": "GPT of 1.4 M parameters"}

WHATIF_ERRORS = Table(
    kinds=["pair"],
    columns=lambda rows: [
        ("gradients", "`{setting}`"),
        *((f"{link:g} Mbit/s", _pair, link) for link in links_of(rows)),
    ],
    lines=partial(pivot, of=["setting"], by="link_mbit"),
    text=_errors_text,
)


WHATIF_FSDP = replace(
    WHATIF_ERRORS,
    text=lambda meta, rows: (
        "A step as measured, medians, and by how much its prediction is off. `all-ranks`: sharded "
        "over all ranks, as torch sends it, or with parameters and gradients in a codec (`int8`: "
        "gradients in `qsgd:bits=8`). The others: a replica on each node, the codec between them. "
        f"{_MODELS[meta['arguments']['model']]}, on {meta['arguments']['layout']} nodes x ranks "
        f"that share {meta['machine']['cores']} cores. Error over {_sizes(meta['errors'])}"
    ),
)


WHATIF_SCALING = Table(
    kinds=["scaling"],
    columns=lambda rows: [
        ("Predicted", "`{codec}`"),
        *((f"{n:,} nodes", "{step_ms:,.0f}", n) for n in sorted({row["hosts"] for row in rows})),
    ],
    lines=partial(pivot, of=["form", "codec"], by="hosts"),
    text=lambda meta, rows: (
        "Predicted, not measured: milliseconds of a step by the number of nodes, one rank each, "
        f"flat, at {meta['base']['link_mbit']:g} Mbit/s, from the same profile of 2 nodes. `topk` "
        "gathers what every rank has sent: its bytes grow with the number of ranks."
    ),
)


def _planted(row: Row) -> str:
    if row["kind"] == "skew":
        return f"rank 1 late by {row['planted_ms']:g} ms, `{row['codec']}`"
    return f"{row['planted_ms']:g} ms in every encoding, {row['known_ms']:.0f} ms a step"


_LOADS = {"idle": "nothing", "both ways": "allreduces", "one way": "messages one way"}


def _wire_columns(rows: Rows) -> list[Column]:
    own = rows[0]["congestion_control"]

    def link(row: Row) -> str:
        control = row["congestion_control"]
        return of_link(row["link_mbit"]) + ("" if control == own else f", {control}")

    def peak(row: Row) -> str:
        ends = (100 * row[f"peak_gbps_{end}"] / row["payload_gbps"] for end in ("low", "high"))
        return f"{100 * row['peak_of_payload']:.0f} % ({' to '.join(f'{end:.0f}' for end in ends)})"

    share = "{{{0}:x100.{1}f}} % ({{{0}_low:x100.{1}f}} to {{{0}_high:x100.{1}f}})"
    return [
        ("link", link),
        ("gradients", "`{codec}`"),
        ("limit", "{payload_gbps:x1000,.1f}"),
        ("interface", "{link_gbps:x1000,.1f}"),
        ("of limit", share.format("link_of_payload", 0)),
        ("`wire_gbps`", "{wire_gbps:x1000,.1f}"),
        ("of interface", share.format("of_link", 1)),
        ("`link_gbps`", "{peak_gbps:x1000,.1f}"),
        ("of limit", peak),
    ]


WIRE = Table(
    kinds=["wire"],
    columns=_wire_columns,
    text=lambda meta, rows: (
        "2 nodes, 17 MB of gradients of one sample; Mbit/s of payload, which is 1448 of the 1514 "
        "bytes of a frame. Limit: of the shaped link. Interface: packets of both nodes, with the "
        "kernel's timestamps, in the interval over which the profile takes its rate. Medians of "
        f"{rows[0]['runs']} runs, with the lowest and the highest. TCP's congestion control is "
        f"{rows[0]['congestion_control']} where no other is named."
    ),
)


def _more(name: str) -> str:
    return (
        f"{{{name}_more_ms:+.1f}} ({{{name}_more_low_ms:+.1f}} to {{{name}_more_high_ms:+.1f}}) ms"
    )


TRUTH = Table(
    kinds=["skew", "codec"],
    columns=[
        ("injected", _planted),
        ("samples", "{count}"),
        ("median error", "{median_ms:.2f} ms"),
        ("max error", lambda row: f"{abs(row['worst_ms']):.2f} ms"),
    ],
    text="Every step in detail, against timestamps that the ranks themselves took at the same "
    "places. If a rank is preempted between the two, the error contains the preemption.",
)


CLOCKS = Table(
    kinds=["clocks"],
    columns=[
        ("on the link", lambda row: _LOADS[row["load"]]),
        ("readings", "{count}"),
        ("median error", "{median_us:,.0f} µs"),
        ("max error", "{worst_us:,.0f} µs"),
        ("stated uncertainty", "± {uncertainty_us:,.0f} µs"),
        ("error within", "{within:x100.0f} %"),
    ],
    text=lambda meta, rows: (
        f"2 nodes that share one clock, so that the true offset is 0, {rows[0]['link_mbit']:g} "
        "Mbit/s; within: readings whose error is within the stated uncertainty."
    ),
)


COST = Table(
    kinds=["cost"],
    columns=[
        ("gradients", "`{codec}`"),
        ("buckets", "{buckets}"),
        ("step", "{step_ms:.1f} ms"),
        ("increase", _more("step")),
        ("CPU", "{cpu_ms:.1f} ms"),
        ("increase of CPU", _more("cpu")),
        ("`profiler_overhead`", "{overhead:x100.1f} %"),
        ("detailed steps", "{detailed:x100.0f} %"),
    ],
    text=lambda meta, rows: (
        "2 ranks, `max_overhead=0.01`, alternating blocks with and without the profiler, "
        f"{rows[0]['rounds']} of each, after the profiler has adjusted its share of detailed "
        "steps; medians over blocks, of the differences with quartiles; CPU of all threads of a "
        "rank. With plain `ddp`, all steps use a Python communication hook that scales the "
        "gradients in a separate pass; `profiler_overhead` includes the hook, not the switch to "
        f"Python. Load average at the start: {meta['machine']['load_before']:g}."
    ),
)
