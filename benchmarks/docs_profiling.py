"""The tables about the profiler: what it says of what was planted, what it costs, its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.docs_markdown import Result, Row, caption, link_of, number, table

_NAMES = {"ddp": "`ddp`", "int8": "`int8`"}
_LOADS = {"idle": "nothing", "both ways": "allreduces", "one way": "messages one way"}


def truth(result: Result) -> str | None:
    """Planted skew and time of a codec, and how far the profile is from what ranks saw."""
    rows = [row for row in result["rows"] if row["kind"] in ("skew", "codec")]
    if not rows:
        return None
    heads = ["planted", "times", "median miss", "worst miss"]
    lines = [
        [
            _planted(row),
            str(row["count"]),
            f"{row['median_ms']:.2f} ms",
            f"{abs(row['worst_ms']):.2f} ms",
        ]
        for row in rows
    ]
    text = (
        "Every step in detail, against what the ranks themselves timed at the same places. The two "
        "are not read at the same instant: a rank that loses its core between them misses by that."
    )
    return "\n\n".join([table(heads, lines), _caption(text, result, "skew")])


def wire(result: Result) -> str | None:
    """Rates of links: planted, by the packets of the links, and as the profile has them."""
    rows = _of(result, "wire")
    if not rows:
        return None
    heads = [
        "link",
        "gradients",
        "planted",
        "interface",
        "of planted",
        "`wire_gbps`",
        "of interface",
        "`peak_gbps`",
        "of planted",
    ]
    own = rows[0]["congestion_control"]
    lines = [
        [
            link_of(row["link_mbit"])
            + (f", {row['congestion_control']}" if row["congestion_control"] != own else ""),
            _NAMES[row["codec"]],
            _mbit(row["payload_gbps"]),
            _mbit(row["link_gbps"]),
            _percent(row["link_of_payload"], _ends(row, "link_of_payload")),
            _mbit(row["wire_gbps"]),
            _percent(row["of_link"], _ends(row, "of_link"), digits=1),
            _mbit(row["peak_gbps"]),
            _percent(
                row["peak_of_payload"],
                (
                    row["peak_gbps_low"] / row["payload_gbps"],
                    row["peak_gbps_high"] / row["payload_gbps"],
                ),
            ),
        ]
        for row in rows
    ]
    text = (
        "2 hosts, 17 MB of gradients of one sample; Mbit/s of payload, which is 1448 of the 1514 "
        "bytes of a frame. Interface: what those of both hosts have sent in just the time over "
        "which the profile takes its rate, from the packets with the kernel's time. "
        f"Medians of {rows[0]['runs']} runs, with the lowest and the highest. "
        f"TCP's congestion control is {own} where no other is named."
    )
    return "\n\n".join([table(heads, lines), _caption(text, result, "wire")])


def clocks(result: Result) -> str | None:
    """Offsets of clocks that are one."""
    rows = _of(result, "clocks")
    if not rows:
        return None
    heads = ["on the link", "readings", "median error", "worst", "says of itself", "error within"]
    lines = [
        [
            _LOADS[row["load"]],
            str(row["count"]),
            *(f"{number(row[name], 0)} µs" for name in ("median_us", "worst_us")),
            f"± {number(row['uncertainty_us'], 0)} µs",
            f"{100 * row['within']:.0f} %",
        ]
        for row in rows
    ]
    text = (
        f"2 hosts that share a clock and compare it as if they did not, {rows[0]['link_mbit']:g} "
        "Mbit/s; within: readings that are off by no more than they say."
    )
    return "\n\n".join([table(heads, lines), _caption(text, result, "clocks")])


def cost(result: Result) -> str | None:
    """A step with and without the profiler."""
    rows = _of(result, "cost")
    if not rows:
        return None
    heads = ["gradients", "buckets", "step", "more", "CPU", "more CPU", "counted", "in detail"]
    lines = [
        [
            _NAMES[row["codec"]],
            str(row["buckets"]),
            f"{row['step_ms']:.1f} ms",
            _spread(row, "step"),
            f"{row['cpu_ms']:.1f} ms",
            _spread(row, "cpu"),
            f"{100 * row['overhead']:.1f} %",
            f"{100 * row['detailed']:.0f} %",
        ]
        for row in rows
    ]
    text = (
        f"2 ranks, `budget=0.01`, blocks with and without in turn, {rows[0]['rounds']} of each, "
        "after steps in which the profiler finds out how many it may look at; "
        "medians over blocks, of the differences with quartiles; CPU of all threads of a rank. "
        "Counted: what the profiler says it took; in detail: steps in which it looked at buckets. "
        "Plain `ddp` gets a Python hook in the place of DDP's own, in all steps, which scales the "
        "gradients in a pass of its own; the switch to Python is not counted. The load of the "
        f"machine was {_meta(result, 'cost')['machine']['load_before']:g} at the begin."
    )
    return "\n\n".join([table(heads, lines), _caption(text, result, "cost")])


def outputs(result: Result) -> str | None:
    """Files of a profile."""
    rows = _of(result, "outputs")
    if not rows:
        return None
    heads = ["ranks", "steps", "lines", "read", "summarize", "html", "trace", "csv"]
    lines = [
        [
            str(row["ranks"]),
            f"{row['steps']:,}",
            f"{row['lines_mb']:.1f} MB",
            *(f"{row[f'{name}_s']:.1f} s" for name in ("read", "summarize")),
            *(
                f"{row[f'{name}_s']:.1f} s, {row[f'{name}_mb']:.1f} MB"
                for name in ("html", "trace", "csv")
            ),
        ]
        for row in rows
    ]
    text = "8 buckets of 3 spans, every step in detail; on one core."
    return "\n\n".join([table(heads, lines), _caption(text, result, "outputs")])


def _meta(result: Result, kind: str) -> Mapping[str, Any]:
    """Of the run that measured these rows."""
    renewed: Mapping[str, Any] = result["meta"].get("renewed", {})
    return renewed.get(kind, result["meta"])


def _caption(text: str, result: Result, kind: str) -> str:
    return caption(text, {"meta": _meta(result, kind)})


def _mbit(gbps: float) -> str:
    return f"{1000 * gbps:,.1f}"


def _ends(row: Row, name: str) -> tuple[float, float]:
    return row[f"{name}_low"], row[f"{name}_high"]


def _percent(share: float, ends: tuple[float, float], *, digits: int = 0) -> str:
    median, low, high = (f"{100 * each:.{digits}f}" for each in (share, *ends))
    return f"{median} % ({low} to {high})"


def _of(result: Result, kind: str) -> Sequence[Row]:
    return [row for row in result["rows"] if row["kind"] == kind]


def _planted(row: Row) -> str:
    if row["kind"] == "skew":
        return f"rank 1 late by {row['planted_ms']:g} ms, {_NAMES[row['codec']]}"
    return f"{row['planted_ms']:g} ms in every encoding, {row['known_ms']:.0f} ms a step"


def _spread(row: Row, name: str) -> str:
    more, low, high = (row[f"{name}_more{part}_ms"] for part in ("", "_low", "_high"))
    return f"{more:+.1f} ({low:+.1f} to {high:+.1f}) ms"
