"""Writes the measured tables of README.md and docs/ from the JSON of the benchmarks.

    python -m benchmarks.docs_tables            # or `make tables`
    python -m benchmarks.docs_tables --check    # exit status 1 where a document is not up to date

Measures nothing. A document says where a table belongs:

    <!-- measured:NAME -->
    ... whatever stands here is replaced ...
    <!-- /measured:NAME -->

NAME is one of `SECTIONS`. Where the results of a section are missing, what stands in the document
stays, and a line on stderr says so. What the figures mean is in the benchmark that measured them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.launch import Layout
from benchmarks.harness.tables import Column, Row, cell_of, megabytes, name_of, of_link, pivot

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "docs/choosing-a-codec.md",
    "docs/hierarchical.md",
    "docs/checkpoints.md",
    "docs/elastic.md",
    "docs/profiling.md",
)

Result = Mapping[str, Any]  # {"meta": ..., "rows": [...]}
Rows = Sequence[Row]
NA = "n/a"


def markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """A table: the first column names the row, the others are right-aligned."""
    heads = [column[0] for column in columns]
    lines = [[cell_of(column, row) for column in columns] for row in rows]
    table = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in table)


def caption(text: str, meta: Mapping[str, Any]) -> str:
    """What was measured, and where and when."""
    machine, commit = meta["machine"], meta.get("git_commit") or "unknown"
    short = re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", commit)
    return (
        f"<sub>{text} {meta['date'][:10]}, commit {short}, torch {meta['versions']['torch']}, "
        f"{machine['cpu']}, {machine['cores']} cores.</sub>"
    )


def reasons(rows: Iterable[Row]) -> list[str]:
    """One list, or none: each row that was refused or broke, and why."""
    of_row = {row.get("row") or row["codec"]: row["reason"] for row in rows if row.get("reason")}
    lines = [" ".join(f"{name_of(name)}: {why}".split()) for name, why in of_row.items()]
    return ["\n".join(f"- {_escape(line)}" for line in lines)] if lines else []


@dataclass(frozen=True, kw_only=True)
class Table:
    """A section of one table and a caption.

    Args:
        columns: a head and how a cell is made, each.
        has: rows of the result that are in the table have this field;
        kinds: or are of these kinds.
        text: the caption, or what makes it of the meta data and the rows.
        total: what makes a last row of all rows.
    """

    columns: Sequence[Column]
    text: str | Callable[[Mapping[str, Any], Rows], str]
    has: str | None = None
    kinds: Sequence[str] = ()
    total: Callable[[Rows], Row] | None = None

    def __call__(self, result: Result) -> str | None:
        """The section; None where the result has no rows for it."""
        rows = [row for row in result["rows"] if self.has is None or self.has in row]
        if self.kinds:
            rows = [row for row in rows if row["kind"] in self.kinds]
        if not rows:
            return None
        of_kind = result["meta"].get("renewed", {})
        meta = of_kind.get(self.kinds[0], result["meta"]) if self.kinds else result["meta"]
        text = self.text if isinstance(self.text, str) else self.text(meta, rows)
        shown = [*rows, self.total(rows)] if self.total else rows
        return f"{markdown(self.columns, shown)}\n\n{caption(text, meta)}"


def step_times(result: Result, *, hosts: int) -> str | None:
    """Time of a step and bytes per codec: a column pair for every link, slowest link first."""
    rows = [row for row in result["rows"] if row["hosts"] == hosts]
    measured = [row for row in rows if row.get("reason") is None]
    if not measured:
        return None
    links = _links(measured)
    columns: list[Column] = [(f"{hosts} hosts", "{codec!n}"), ("MB sent", "{wire_bytes!b}")]
    for link in links:
        columns.append((f"{of_link(link)}: step", "{step_ms_median:,.0f} ms", link))
        columns.append(("faster than fp32 / fp16 hook", _faster, link))
    by_link = sorted(measured, key=lambda row: links.index(row["link_mbit"]))
    order = list(dict.fromkeys(row["codec"] for row in measured))
    lines = sorted(
        pivot(by_link, of=["codec"], by="link_mbit"), key=lambda row: order.index(row["codec"])
    )
    rounds = {row["link_mbit"]: row["rounds"] for row in measured}
    timed = ", ".join(f"{rounds[link]} at {of_link(link)}" for link in links)
    text = (
        f"Median step of 10 x Linear(1024, 1024), 42 MB of gradients, {hosts} hosts x "
        f"{rows[0]['ranks_per_host']} ranks; MB sent per rank and step, over the slowest of these "
        f"links. Codecs with their default options. Timed steps: {timed}."
    )
    return "\n\n".join([markdown(columns, lines), *reasons(rows), caption(text, result["meta"])])


def forms(result: Result) -> str | None:
    """Step times by form and codec, a table for every layout."""
    rows = [row for row in result["rows"] if row["reason"] is None]
    tables = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        shape = Layout.parse(layout)
        of_layout = [row for row in rows if row["layout"] == layout]
        mean_ranks = shape.world_size / shape.hosts
        columns: list[Column] = [
            (shape.title, _form_and_codec),
            ("MB to others", lambda row, n=mean_ranks: megabytes(row["wire_bytes"] * n)),
            ("MB inside", "{lo_bytes!b}"),
        ]
        for link in _links(of_layout):
            columns.append((f"{of_link(link)}: step", "{step_ms_median:,.0f} ms", link))
            columns.append(("faster than fp32 / fp16 hook", _faster, link))
            columns.append(("% of the link", "{wire_limit_pct:,.0f}", link))
        tables.append(markdown(columns, pivot(of_layout, of=["form", "codec"], by="link_mbit")))
    text = (
        "Median step of 10 x Linear(1024, 1024), 42 MB of gradients; MB that a host sends to "
        "others (interface) and to itself (loopback) in a step; % of the link: bytes over the "
        "link's rate, by the time that communication adds to the step. All ranks share two cores."
    )
    return "\n\n".join([*tables, caption(text, result["meta"])]) if tables else None


def curve(result: Result) -> str | None:
    """What the cost model says of more hosts."""
    rows, meta = result["rows"], result["meta"]
    if not rows:
        return None
    rows = [{**row, "line": (row["form"], row["codec"])} for row in rows]
    columns: list[Column] = [("PREDICTION: hosts", "{hosts:,}")]
    for line in dict.fromkeys(row["line"] for row in rows):
        cell = "{predicted_ms:,.0f} ms ({speedup_vs_flat_fp32:.1f}x)"
        columns.append((f"{line[0]} `{line[1]}`", cell, line))
    errors = meta["errors"]
    text = (
        f"{meta['label']}: communication of a step of 42 MB, {rows[0]['ranks_per_host']} ranks per "
        f"host, {rows[0]['gbit']:g} Gbit/s per host, this machine's loopback inside and its CPUs "
        f"for the codecs, {rows[0]['round_us']:.0f} us per round between hosts (too few ranks to "
        f"tell). Error of the fit over {errors['rows']} measured rows: median "
        f"{errors['median'] * 100:.1f} %, largest {errors['largest'] * 100:.0f} %."
    )
    return f"{markdown(columns, pivot(rows, of=['hosts'], by='line'))}\n\n<sub>{text}</sub>"


def kernels(result: Result) -> str | None:
    """Speed of encode and settle beside a copy; fused kernels, where a codec has them."""
    rows = [row for row in result["rows"] if "mode" in row]
    of_mode = pivot(rows, of=["codec", "error_feedback"], by="mode")
    lines = [row["by"].get("fused", row) for row in of_mode]
    return _KERNELS({**result, "rows": lines})


def convergence(result: Result, *, task: str) -> str | None:
    """One table for each metric of the task: where each codec ends, and how far from fp32 DDP."""
    rows = [row for row in result["rows"] if row["task"] == task]
    metrics = list(next((row["metrics"] for row in rows if row["metrics"]), {}))
    if not metrics:
        return None
    tables = []
    for metric in metrics:
        name = metric.replace("_", " ")
        columns: list[Column] = [(name, "{row!n}"), ("times fewer bytes", "{bytes_ratio:,.1f}")]
        for ranks in sorted({row["ranks"] for row in rows}):
            columns.append((f"{ranks} ranks", partial(_end, metric=metric), ranks))
            columns.append(("difference to `ddp`, %", partial(_off, metric=metric), ranks))
        of_rows = [row for row in rows if row["metrics"]]
        tables.append(markdown(columns, pivot(of_rows, of=["row"], by="ranks")))
    steps = result["meta"]["arguments"].get("steps")
    text = (
        f"Task `{task}`{f' of {steps} steps' if steps else ''}, "
        f"{max(len(row['seeds']) for row in rows)} seeds: mean and standard deviation after the "
        "last step; difference to fp32 DDP with the same seed, mean and standard deviation. =: the "
        "mean difference is within DDP's own standard deviation over seeds."
    )
    return "\n\n".join([*tables, *reasons(rows), caption(text, result["meta"])])


def time_to_accuracy(result: Result) -> str | None:
    """How long until the loss is as low as fp32 DDP's."""
    rows = [row for row in result["rows"] if row["step_ms"] is not None]
    if not rows:
        return None

    def reached(row: Row, *, key: str, unit: str) -> str:
        missing = NA if row["row"] == "no-comm" else "not reached"  # it has no target
        return missing if row[key] is None else f"{row[key]:,.0f}{unit}"

    columns: list[Column] = [
        ("", "{row!n}"),
        ("step", "{step_ms:,.0f} ms"),
        ("MB sent per step", "{wire_bytes_per_step!b}"),
        ("steps to target", partial(reached, key="steps_to_target", unit="")),
        ("time to target", partial(reached, key="seconds_to_target", unit=" s")),
        ("faster than fp32 / fp16 hook", ["{speedup_vs_fp32:.2f}x", "{speedup_vs_fp16:.2f}x"]),
    ]
    meta = result["meta"]
    text = (
        f"Byte-level GPT on 2 hosts, {of_link(meta['arguments']['link'])}: training time until the "
        "validation loss is what fp32 DDP reaches; means over seeds. Communication is "
        f"{meta['communication_share_pct']:.0f} % of fp32 DDP's step."
    )
    parts = [markdown(columns, rows), *reasons(result["rows"]), caption(text, meta)]
    return "\n\n".join(parts)


def checkpoint(result: Result) -> str | None:
    """Costs of a save, one line for every way to save; then the goals."""
    rows, meta = [row for row in result["rows"] if "stall_ms" in row], result["meta"]
    if not rows:
        return None
    text = (
        f"A state of {meta['state_mb']:.0f} MB in 96 tensors, medians of "
        f"{rows[0]['rounds']} interleaved rounds, one thread, local disk. Standing still: the "
        "call, and what the next optimizer step was held back. Steps meanwhile: how much longer "
        "small training steps take while it is written. Memory: of all processes."
    )
    return "\n\n".join(
        [markdown(_SAVES, rows), markdown(_GOALS, meta["goals"]), caption(text, meta)]
    )


def crash_campaign(result: Result) -> str | None:
    """What was done to checkpoints, how often, and what went wrong."""
    rows, meta = result["rows"], result["meta"]
    if not rows:
        return None
    counts = [name for name, value in rows[0].items() if isinstance(value, int)]
    text = (
        "After every trial: the newest checkpoint that was reported complete, or a later one, is "
        "found and whole; damaged ones are detected; files of others are as they were; a resumed "
        "training ends with the same bits as one that was not disturbed. A trial counts under "
        f"every problem it had. {meta['seconds'] / 60:.0f} minutes, seed {meta['seed']}."
    )
    columns = [("", "{kind}"), *((name, f"{{{name}:,}}") for name in counts)]
    return f"{markdown(columns, rows)}\n\n{caption(text, meta)}"


def loop_campaign(result: Result) -> str | None:
    """One line for all kinds of fault."""
    rows = [row for row in result["rows"] if "struck" in row]
    if not rows:
        return None
    found = [seconds for row in rows for seconds in row["recoveries_s"]]
    line = {"kinds": len(rows), **_sums(rows), "median": median(found), "most": max(found)}
    text = (
        "`ElasticLoop` around plain DDP: the faults of the table above before the start, in "
        "passes, between `backward` and `step`, after steps and epochs, drawn at random from seed "
        f"{result['meta']['seed']}; judged in the same way."
    )
    columns: list[Column] = [
        ("kinds of fault", "{kinds}"),
        *_COUNTS,
        ("to a new step", "{median:.1f} s"),
        ("at most", "{most:.1f} s"),
    ]
    return f"{markdown(columns, [line])}\n\n{caption(text, result['meta'])}"


def whatif_errors(result: Result) -> str | None:
    """Each setting at each rate: what was measured, and the error of the prediction."""
    pairs = [row for row in result["rows"] if row["kind"] == "pair"]
    if not pairs:
        return None

    def pair(row: Row) -> str:
        error = row["relative_error"]
        off = NA if error is None else f"{100 * error:+.0f} %"
        return f"{row['measured_ms']:,.0f} ms" + (
            " (the profile)" if row["is_base"] else f", {off}"
        )

    columns: list[Column] = [("gradients", "`{setting}`")]
    columns += [(f"{link:g} Mbit/s", pair, link) for link in _links(pairs)]
    meta = result["meta"]
    base, of, any_of = meta["base"], meta["errors"], meta["errors_from_any"]
    text = (
        "A step as measured, medians, and by how much its prediction is off. All from one profile, "
        f"of `{base['setting']}` at {base['link_mbit']:g} Mbit/s, with costs of codecs and small "
        "collectives that were measured before the first step. 2 hosts of one rank with one core, "
        f"42 MB of gradients. Error over {of['rows']:g} predictions: median "
        f"{100 * of['median']:.1f} %, largest {100 * of['largest']:.1f} %. From each of the "
        f"{len(pairs)} runs as the profile, {any_of['rows']:g} predictions: median "
        f"{100 * any_of['median']:.1f} %, largest {100 * any_of['largest']:.1f} %."
    )
    lines = pivot(pairs, of=["setting"], by="link_mbit")
    return f"{markdown(columns, lines)}\n\n{caption(text, meta)}"


def whatif_scaling(result: Result) -> str | None:
    """What the same profile says of many hosts."""
    rows = [row for row in result["rows"] if row["kind"] == "scaling"]
    if not rows:
        return None
    columns: list[Column] = [("PREDICTION", "`{codec}`")]
    for hosts in sorted({row["hosts"] for row in rows}):
        columns.append((f"{hosts:,} hosts", "{step_ms:,.0f}", hosts))
    text = (
        "Predicted, not measured: milliseconds of a step by the number of hosts, one rank each, "
        f"flat, at {result['meta']['base']['link_mbit']:g} Mbit/s, from the same profile of 2 "
        "hosts. `topk` gathers what every rank has sent: its bytes grow with the number of ranks."
    )
    lines = pivot(rows, of=["form", "codec"], by="hosts")
    return f"{markdown(columns, lines)}\n\n{caption(text, result['meta'])}"


def _links(rows: Rows) -> list[Any]:
    links = {row["link_mbit"] for row in rows}
    return sorted(links, key=lambda mbit: float("inf") if mbit is None else mbit)


def _faster(row: Row) -> str:
    if row["codec"] == "no-comm":
        return NA
    return f"{row['speedup_vs_fp32']:.2f}x / {row['speedup_vs_fp16']:.2f}x"


def _form_and_codec(row: Row) -> str:
    return name_of(row["codec"]) if row["form"] is None else f"{row['form']} `{row['codec']}`"


def _with_spread(value: float | None, spread: float | None, form: str) -> str:
    if value is None:
        return NA
    return f"{value:{form}}" if spread is None else f"{value:{form}} ± {spread:{form.lstrip('+')}}"


def _end(row: Row, *, metric: str) -> str:
    value = row["metrics"].get(metric, {})
    return _with_spread(value.get("mean"), value.get("std"), ".3f")


def _off(row: Row, *, metric: str) -> str:
    if row["codec"] == "ddp":
        return NA
    value = row["metrics"].get(metric, {})
    same = " =" if value.get("within_ddp_spread") else ""
    return _with_spread(value.get("diff_pct_of_ddp"), value.get("diff_pct_std"), "+.2f") + same


def _figure(value: Mapping[str, Any] | None, unit: str = " ms") -> str:
    if value is None:
        return NA
    number = value["median"]
    return (f"{number:,.1f}" if number < 100 else f"{number:,.0f}") + unit


def _stall(row: Row) -> str:
    held = row["held_ms"]
    return _figure(row["stall_ms"]) + (f" + {_figure(held)}" if held else "")


def _way(row: Row) -> str:
    ours = row["row"].removeprefix("ours ")
    return row["row"] if ours == row["row"] else f"ours, `{ours}`"


def _goal(goal: Row, *, key: str) -> str:
    return f"{goal[key]:.2f}{'' if goal['unit'] in 'x%' else ' '}{goal['unit']}"


def _exact(row: Row) -> str:
    if row["ids_exact"]:
        return "yes"
    return f"no: {row['samples_missed']:.0f} missed, {row['samples_twice']:.0f} twice"


def _seconds(row: Row, *, key: str) -> str:
    """Nothing for the sum of all rows."""
    return cell_of(("", f"{{{key}:.1f}} s"), row) if key in row else ""


def _sums(rows: Rows) -> dict[str, int]:
    return {key: sum(row[key] for row in rows) for key in ("trials", "struck", "failed")}


def _planted(row: Row) -> str:
    if row["kind"] == "skew":
        return f"rank 1 late by {row['planted_ms']:g} ms, `{row['codec']}`"
    return f"{row['planted_ms']:g} ms in every encoding, {row['known_ms']:.0f} ms a step"


def _load(row: Row) -> str:
    return {"idle": "nothing", "both ways": "allreduces", "one way": "messages one way"}[
        row["load"]
    ]


def _wire_columns(own: str) -> list[Column]:
    """own: the congestion control that is not named."""

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
        ("planted", "{payload_gbps:x1000,.1f}"),
        ("interface", "{link_gbps:x1000,.1f}"),
        ("of planted", share.format("link_of_payload", 0)),
        ("`wire_gbps`", "{wire_gbps:x1000,.1f}"),
        ("of interface", share.format("of_link", 1)),
        ("`peak_gbps`", "{peak_gbps:x1000,.1f}"),
        ("of planted", peak),
    ]


def wire(result: Result) -> str | None:
    """Rates of links: planted, by the packets of the links, and as the profile has them."""
    rows = [row for row in result["rows"] if row["kind"] == "wire"]
    own = rows[0]["congestion_control"] if rows else ""
    text = (
        "2 hosts, 17 MB of gradients of one sample; Mbit/s of payload, which is 1448 of the 1514 "
        "bytes of a frame. Interface: what those of both hosts have sent in just the time over "
        "which the profile takes its rate, from the packets with the kernel's time. "
        f"Medians of {rows[0]['runs'] if rows else 0} runs, with the lowest and the highest. "
        f"TCP's congestion control is {own} where no other is named."
    )
    return Table(kinds=["wire"], columns=_wire_columns(own), text=text)(result)


def _more(name: str) -> str:
    return (
        f"{{{name}_more_ms:+.1f}} ({{{name}_more_low_ms:+.1f}} to {{{name}_more_high_ms:+.1f}}) ms"
    )


_COUNTS: list[Column] = [
    ("trials", "{trials}"),
    ("met it", "{struck}"),
    ("broken", "{failed}"),
]
_SAVES: list[Column] = [
    ("", _way),
    ("training stands still", _stall),
    ("complete after", lambda row: _figure(row["total_ms"])),
    ("steps meanwhile", "{slowdown_pct[median]:+.1f} %"),
    ("memory", "{memory_mb:,.0f} MB"),
]
_GOALS: list[Column] = [
    ("goal", "{name}"),
    ("measured", partial(_goal, key="measured")),
    ("at most", partial(_goal, key="goal")),
    ("", lambda goal: "met" if goal["met"] else "missed"),
]
_KERNELS = Table(
    columns=[
        ("codec", "`{codec}`"),
        ("error feedback", "{error_feedback!y}"),
        ("kernels", "{mode}"),
        ("encode, GB/s", "{encode_gb_s:,.1f}"),
        ("% of copy", "{encode_limit_pct:,.0f}"),
        ("decode and commit, GB/s", "{settle_gb_s:,.1f}"),
        ("% of copy", "{settle_limit_pct:,.0f}"),
        ("both, % of copy", "{limit_pct:,.0f}"),
    ],
    text=lambda meta, rows: (
        "GB of fp32 gradient per second of one thread's CPU time; a copy makes "
        f"{rows[0]['copy_gb_s']:.1f} GB/s. % of copy: of the rate at which a copy moves the bytes "
        "that the pass has to touch."
    ),
)
_MEMORY = Table(
    has="residual_bytes_per_element",
    columns=[
        ("ranks", "{world_size}"),
        ("residual, bytes per element", "{residual_bytes_per_element:,.1f}"),
        ("payload buffers, bytes per element", "{buffer_bytes_per_element:,.1f}"),
        ("resident set after warm-up", "{resident_mb_warm:.0f} MB"),
        ("at the end", "{resident_mb_end:.0f} MB"),
        ("steps", "{steps:,}"),
    ],
    text="Memory of one rank.",
)
_CAMPAIGN = Table(
    has="struck",
    columns=[
        ("fault", "{kind}"),
        *_COUNTS,
        ("to a new step", partial(_seconds, key="new_step_s")),
        ("at most", partial(_seconds, key="new_step_max_s")),
    ],
    total=lambda rows: {"kind": "all", **_sums(rows)},
    text=lambda meta, rows: (
        "Small trainings of 1 to 4 ranks under torch's elastic agent, drawn at random from seed "
        f"{meta['seed']}. Broken would be: hangs, lost or repeated samples, ranks that differ, "
        "weights that differ. To a new step: from the last fault to a step not done before, by "
        "ranks forked from a process that has imported everything; median. The 20 s are of sharded "
        "checkpoints written on a thread, which waits for what the dead had to write; a writer "
        "process, the default, does not keep the survivors."
    ),
)
_FIGURES = Table(
    has="recovery_s",
    columns=[
        ("", "{way}"),
        ("fault", "{fault}"),
        ("to the first new step", "{recovery_s:.1f} s"),
        ("samples redone", "{samples_redone:,.0f}"),
        ("every sample once", _exact),
    ],
    text="Real torchrun, 2 ranks, a checkpoint every 10 steps, rank 1 struck after step 25; "
    "medians. The others are started again at once, as by somebody who waits for it.",
)
_RENDEZVOUS = Table(
    has="finished",
    columns=[
        ("rendezvous", "{backend}"),
        ("strategy", "`{strategy}`"),
        ("finished", "{finished}"),
        ("failed", "{failed}"),
        ("hung", "{hung}"),
        ("median", "{median_s:.1f} s"),
    ],
    text="Plain torchrun, 2 ranks; hung: still running at the bound. Median of those that "
    "finished.",
)
_OVERHEAD = Table(
    has="step_ms",
    columns=[
        ("fit", "{fit}"),
        ("step", "{step_ms:,.2f} ms"),
        ("least", "{least:,.2f} ms"),
        ("most", "{most:,.2f} ms"),
    ],
    text="2 ranks, medians of fits that take turns; least and most of the rounds; in the hooks: "
    "median, 5th and 95th percentile of all steps, the vote of all ranks included.",
)
_TRUTH = Table(
    kinds=["skew", "codec"],
    columns=[
        ("planted", _planted),
        ("times", "{count}"),
        ("median miss", "{median_ms:.2f} ms"),
        ("worst miss", lambda row: f"{abs(row['worst_ms']):.2f} ms"),
    ],
    text="Every step in detail, against what the ranks themselves timed at the same places. The "
    "two are not read at the same instant: a rank that loses its core between them misses by that.",
)
_CLOCKS = Table(
    kinds=["clocks"],
    columns=[
        ("on the link", _load),
        ("readings", "{count}"),
        ("median error", "{median_us:,.0f} µs"),
        ("worst", "{worst_us:,.0f} µs"),
        ("says of itself", "± {uncertainty_us:,.0f} µs"),
        ("error within", "{within:x100.0f} %"),
    ],
    text=lambda meta, rows: (
        "2 hosts that share a clock and compare it as if they did not, "
        f"{rows[0]['link_mbit']:g} Mbit/s; within: readings that are off by no more than they say."
    ),
)
_COST = Table(
    kinds=["cost"],
    columns=[
        ("gradients", "`{codec}`"),
        ("buckets", "{buckets}"),
        ("step", "{step_ms:.1f} ms"),
        ("more", _more("step")),
        ("CPU", "{cpu_ms:.1f} ms"),
        ("more CPU", _more("cpu")),
        ("counted", "{overhead:x100.1f} %"),
        ("in detail", "{detailed:x100.0f} %"),
    ],
    text=lambda meta, rows: (
        f"2 ranks, `budget=0.01`, blocks with and without in turn, {rows[0]['rounds']} of each, "
        "after steps in which the profiler finds out how many it may look at; "
        "medians over blocks, of the differences with quartiles; CPU of all threads of a rank. "
        "Counted: what the profiler says it took; in detail: steps in which it looked at buckets. "
        "Plain `ddp` gets a Python hook in the place of DDP's own, in all steps, which scales the "
        "gradients in a pass of its own; the switch to Python is not counted. The load of the "
        f"machine was {meta['machine']['load_before']:g} at the begin."
    ),
)
_OUTPUTS = Table(
    kinds=["outputs"],
    columns=[
        ("ranks", "{ranks}"),
        ("steps", "{steps:,}"),
        ("lines", "{lines_mb:.1f} MB"),
        *((name, f"{{{name}_s:.1f}} s") for name in ("read", "summarize")),
        *((name, f"{{{name}_s:.1f}} s, {{{name}_mb:.1f}} MB") for name in ("html", "trace", "csv")),
    ],
    text="8 buckets of 3 spans, every step in detail; on one core.",
)

SECTIONS: dict[str, tuple[str, Callable[[Result], str | None]]] = {
    "steps-2-hosts": ("allreduce", partial(step_times, hosts=2)),
    "steps-4-hosts": ("allreduce", partial(step_times, hosts=4)),
    "hierarchical": ("hierarchical", forms),
    "hierarchical-curve": ("hierarchical_model", curve),
    "kernels": ("codecs", kernels),
    "memory": ("codecs", _MEMORY),
    "convergence-gpt": ("convergence", partial(convergence, task="gpt")),
    "convergence-gpt-long": ("convergence_long", partial(convergence, task="gpt")),
    "convergence-digits": ("convergence", partial(convergence, task="digits")),
    "checkpoint": ("checkpoint", checkpoint),
    "crash-campaign": ("crash_campaign", crash_campaign),
    "restart-campaign": ("faults_restart", _CAMPAIGN),
    "restart-loop": ("faults_restart_loop", loop_campaign),
    "restart-figures": ("faults_figures", _FIGURES),
    "restart-rendezvous": ("restart_rendezvous", _RENDEZVOUS),
    "elastic-overhead": ("elastic_overhead", _OVERHEAD),
    "profile-truth": ("profiling", _TRUTH),
    "profile-wire": ("profiling", wire),
    "profile-clocks": ("profiling", _CLOCKS),
    "profile-cost": ("profiling", _COST),
    "profile-outputs": ("profiling", _OUTPUTS),
    "whatif-errors": ("whatif", whatif_errors),
    "whatif-scaling": ("whatif", whatif_scaling),
    "time-to-accuracy": ("time_to_accuracy", time_to_accuracy),
}
"""The name in a document -> the results it needs, and what makes a table of them."""


def print_tables(meta: Mapping[str, Any], rows: Rows, *names: str) -> None:
    """Sections of results that were just measured, as they would be in a document."""
    for name in names:
        if text := SECTIONS[name][1]({"meta": meta, "rows": rows}):
            print(f"\n{text}", flush=True)


_SECTION = re.compile(
    r"(?P<start><!-- measured:(?P<name>[\w-]+) -->\n).*?(?P<end><!-- /measured:(?P=name) -->)",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- /?measured:")


class DocumentError(ValueError):
    """A document has markers that no table belongs to, or that do not pair."""


def render(text: str, results: Mapping[str, Result]) -> tuple[str, list[str]]:
    """The document with fresh tables, and why some sections were left as they are.

    results: the content of the JSON files by name without `.json`, those that exist.
    """
    left: list[str] = []

    def fresh(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in SECTIONS:
            raise DocumentError(f"no section {name!r}; there are: {', '.join(SECTIONS)}")
        source, make = SECTIONS[name]
        body = make(results[source]) if source in results else None
        if body is None:
            why = "has no such rows" if source in results else "does not exist"
            left.append(f"{name}: {source}.json {why}")
            return match[0]
        return f"{match['start']}{body}\n{match['end']}"

    if len(_MARKER.findall(text)) != 2 * len(_SECTION.findall(text)):
        raise DocumentError("a <!-- measured:NAME --> and its <!-- /measured:NAME --> do not pair")
    return _SECTION.sub(fresh, text), left


def load_results(directory: Path) -> dict[str, dict[str, Any]]:
    """The results that exist."""
    names = sorted({source for source, _ in SECTIONS.values()})
    paths = {name: directory / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main(argv: list[str] | None = None) -> None:
    """Write or check all documents."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, tell by exit status")
    parser.add_argument(
        "--results", type=Path, default=REPOSITORY / "benchmarks" / "results", metavar="DIRECTORY"
    )
    arguments = parser.parse_args(argv)
    results = load_results(arguments.results)
    stale = []
    for name in DOCUMENTS:
        path = REPOSITORY / name
        before = path.read_text()
        try:
            after, left = render(before, results)
        except DocumentError as error:
            sys.exit(f"docs_tables: {name}: {error}")
        for line in left:
            print(f"{name}: left as it is: {line}", file=sys.stderr)
        if after != before:
            stale.append(name)
            if not arguments.check:
                path.write_text(after)
                print(f"{name}: written", file=sys.stderr)
    if arguments.check and stale:
        sys.exit(f"docs_tables: {', '.join(stale)} not up to date; run `make tables`")


def _escape(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    main()
