"""The tables about the profiler: what it says of what was planted, what it costs, its files."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.readme_markdown import Result, Row, caption, link_of, number, table

_NAMES = {"ddp": "`ddp`", "int8": "`int8`"}
_HOOKS = {"torch": "torch's", "off": "ours, not in detail", "on": "ours, in detail"}
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
    return "\n\n".join([table(heads, lines), caption(text, result)])


def wire(result: Result) -> str | None:
    """Rates of links, planted and found."""
    rows = _of(result, "wire")
    if not rows:
        return None
    heads = ["link", "gradients", "payload rate", "`wire_gbps`", "of it", "bytes over step", "step"]
    lines = [
        [
            link_of(row["link_mbit"]),
            _NAMES[row["codec"]],
            f"{row['payload_gbps']:.3f} Gbit/s",
            "n/a" if row["wire_gbps"] is None else f"{row['wire_gbps']:.3f} Gbit/s",
            "n/a" if row["of_payload"] is None else f"{100 * row['of_payload']:.0f} %",
            f"{row['step_gbps']:.3f} Gbit/s",
            f"{number(row['step_ms'], 0)} ms",
        ]
        for row in rows
    ]
    text = (
        "2 hosts, 17 MB of gradients of one sample; payload: 1448 of the 1514 bytes of a frame. "
        "What an exchange does beside sending, such as adding up or waiting for a busy core, is in "
        "the time of its transfer. Bytes over the whole step: the least that the rate can be."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


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
    return "\n\n".join([table(heads, lines), caption(text, result)])


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
        f"machine was {result['meta']['machine']['load_before']:g} at the begin."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def hooks(result: Result) -> str | None:
    """A step with hooks in the place of DDP's own allreduce."""
    rows = _of(result, "hooks")
    if not rows:
        return None
    heads = ["hook", "link", "buckets", "step", "more", "CPU", "more CPU"]
    lines = [
        [
            _HOOKS[row["hook"]],
            link_of(row["link_mbit"]),
            f"{row['buckets']} of {row['bucket_mb']:.2g} MB",
            f"{row['step_ms']:.1f} ms",
            _spread(row, "step"),
            f"{row['cpu_ms']:.1f} ms",
            _spread(row, "cpu"),
        ]
        for row in rows
    ]
    text = (
        "2 ranks with plain DDP, and the same with a hook, in turn, "
        f"{' or '.join(str(n) for n in dict.fromkeys(row['rounds'] for row in rows))} blocks of "
        "each on 3 models of each kind; medians over blocks, of the differences with quartiles; "
        "CPU of all threads of a rank. torch's: `default_hooks.allreduce_hook`. The load of the "
        f"machine was {result['meta']['machine']['load_before']:g} at the begin."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


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
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _of(result: Result, kind: str) -> Sequence[Row]:
    return [row for row in result["rows"] if row["kind"] == kind]


def _planted(row: Row) -> str:
    if row["kind"] == "skew":
        return f"rank 1 late by {row['planted_ms']:g} ms, {_NAMES[row['codec']]}"
    return f"{row['planted_ms']:g} ms in every encoding, {row['known_ms']:.0f} ms a step"


def _spread(row: Row, name: str) -> str:
    more, low, high = (row[f"{name}_more{part}_ms"] for part in ("", "_low", "_high"))
    return f"{more:+.1f} ({low:+.1f} to {high:+.1f}) ms"
