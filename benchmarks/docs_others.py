"""The tables of the documents as Markdown, each from one JSON of the benchmarks.

What the figures mean is in the benchmark that measured them. A function returns None where the
results have no rows for its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.docs_markdown import (
    Result,
    Row,
    caption,
    link_of,
    megabytes,
    name_of,
    number,
    reasons,
    table,
    with_spread,
    yes,
)
from benchmarks.harness.launch import Layout


def step_times(result: Result, *, hosts: int) -> str | None:
    """Time of a step and bytes per codec: a column pair for every link, slowest link first."""
    rows = [row for row in result["rows"] if row["hosts"] == hosts]
    measured = [row for row in rows if row.get("reason") is None]
    if not measured:
        return None
    links = sorted(
        {row["link_mbit"] for row in measured},
        key=lambda mbit: float("inf") if mbit is None else mbit,
    )
    heads = [f"{hosts} hosts", "MB sent"]
    for link in links:
        heads += [f"{link_of(link)}: step", "faster than fp32 / fp16 hook"]
    lines = []
    for codec in dict.fromkeys(row["codec"] for row in measured):
        of_link = {row["link_mbit"]: row for row in measured if row["codec"] == codec}
        sent = of_link[next(link for link in links if link in of_link)]["wire_bytes"]
        cells = [name_of(codec), megabytes(sent)]
        for link in links:
            row = of_link.get(link, {})
            cells.append(f"{row['step_ms_median']:,.0f} ms" if row else "n/a")
            if not row or codec == "no-comm":
                cells.append("n/a")
                continue
            cells.append(f"{row['speedup_vs_fp32']:.2f}x / {row['speedup_vs_fp16']:.2f}x")
        lines.append(cells)
    text = (
        f"Median step of 10 x Linear(1024, 1024), 42 MB of gradients, {hosts} hosts x "
        f"{rows[0]['ranks_per_host']} ranks; MB sent per rank and step, over the slowest of these "
        f"links. Codecs with their default options.{_rounds(measured, links)}"
    )
    return "\n\n".join([table(heads, lines), *reasons(rows), caption(text, result)])


def kernels(result: Result) -> str | None:
    """Speed of encode and settle beside a copy; fused kernels, where a codec has them."""
    rows = [row for row in result["rows"] if "mode" in row]
    fused = {(row["codec"], row["error_feedback"]) for row in rows if row["mode"] == "fused"}
    rows = [
        row
        for row in rows
        if row["mode"] == "fused" or (row["codec"], row["error_feedback"]) not in fused
    ]
    if not rows:
        return None
    heads = ["codec", "error feedback", "kernels", "encode, GB/s", "% of copy"]
    heads += ["decode and commit, GB/s", "% of copy", "both, % of copy"]
    lines = []
    for row in rows:
        cells = [f"`{row['codec']}`", yes(row["error_feedback"]), row["mode"]]
        for name in ("encode", "settle"):
            cells += [number(row[f"{name}_gb_s"], 1), number(row[f"{name}_limit_pct"], 0)]
        lines.append([*cells, number(row["limit_pct"], 0)])
    copy = rows[0]["copy_gb_s"]
    text = (
        f"GB of fp32 gradient per second of one thread's CPU time; a copy makes {copy:.1f} GB/s. "
        "% of copy: of the rate at which a copy moves the bytes that the pass has to touch."
    )
    return f"{table(heads, lines)}\n\n{caption(text, result)}"


def memory(result: Result) -> str | None:
    """What the reducer holds."""
    rows = [row for row in result["rows"] if "residual_bytes_per_element" in row]
    if not rows:
        return None
    heads = ["ranks", "residual, bytes per element", "payload buffers, bytes per element"]
    heads += ["resident set after warm-up", "at the end", "steps"]
    lines = [
        [
            str(row["world_size"]),
            number(row["residual_bytes_per_element"], 1),
            number(row["buffer_bytes_per_element"], 1),
            f"{row['resident_mb_warm']:.0f} MB",
            f"{row['resident_mb_end']:.0f} MB",
            f"{row['steps']:,}",
        ]
        for row in rows
    ]
    return f"{table(heads, lines)}\n\n{caption('Memory of one rank.', result)}"


def convergence(result: Result, *, task: str) -> str | None:
    """One table for each metric of the task: where each codec ends, and how far from fp32 DDP."""
    rows = [row for row in result["rows"] if row["task"] == task]
    metrics = list(next((row["metrics"] for row in rows if row["metrics"]), {}))
    if not metrics:
        return None
    worlds = sorted({row["ranks"] for row in rows})
    parts = [_metric_table(rows, metric, worlds=worlds) for metric in metrics]
    seeds = max(len(row["seeds"]) for row in rows)
    steps = result["meta"]["arguments"].get("steps")
    length = f" of {steps} steps" if steps else ""
    text = (
        f"Task `{task}`{length}, {seeds} seeds: mean and standard deviation after the last step; "
        "difference to fp32 DDP with the same seed, mean and standard deviation. =: the mean "
        "difference is within DDP's own standard deviation over seeds."
    )
    return "\n\n".join([*parts, *reasons(rows), caption(text, result)])


def time_to_accuracy(result: Result) -> str | None:
    """How long until the loss is as low as fp32 DDP's."""
    rows = [row for row in result["rows"] if row["step_ms"] is not None]
    if not rows:
        return None
    heads = ["", "step", "MB sent per step", "steps to target", "time to target"]
    heads += ["faster than fp32 / fp16 hook"]
    lines = []
    for row in rows:
        seconds, steps = row["seconds_to_target"], row["steps_to_target"]
        missing = "n/a" if row["row"] == "no-comm" else "not reached"  # it has no target
        faster = row["speedup_vs_fp32"], row["speedup_vs_fp16"]
        lines.append(
            [
                name_of(row["row"]),
                f"{row['step_ms']:,.0f} ms",
                megabytes(row["wire_bytes_per_step"]),
                missing if steps is None else f"{steps:,.0f}",
                missing if seconds is None else f"{seconds:,.0f} s",
                " / ".join("n/a" if value is None else f"{value:.2f}x" for value in faster),
            ]
        )
    link = link_of(result["meta"]["arguments"]["link"])
    text = (
        f"Byte-level GPT on 2 hosts, {link}: training time until the validation loss is what fp32 "
        "DDP reaches; means over seeds."
    )
    if share := result["meta"].get("communication_share_pct"):
        text += f" Communication is {share:.0f} % of fp32 DDP's step."
    return "\n\n".join([table(heads, lines), *reasons(result["rows"]), caption(text, result)])


def _metric_table(rows: Sequence[Row], metric: str, *, worlds: Sequence[int]) -> str:
    heads = [metric.replace("_", " "), "times fewer bytes"]
    for ranks in worlds:
        heads += [f"{ranks} ranks", "difference to `ddp`, %"]
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        of_world = {row["ranks"]: row for row in rows if row["row"] == name and row["metrics"]}
        if not of_world:
            continue
        first = next(iter(of_world.values()))
        cells = [name_of(name), number(first["bytes_ratio"], 1)]
        for ranks in worlds:
            value = of_world[ranks]["metrics"].get(metric, {}) if ranks in of_world else {}
            cells.append(with_spread(value.get("mean"), value.get("std"), 3))
            if first["codec"] == "ddp":
                cells.append("n/a")
                continue
            same = " =" if value.get("within_ddp_spread") else ""
            difference = with_spread(
                value.get("diff_pct_of_ddp"), value.get("diff_pct_std"), 2, sign="+"
            )
            cells.append(difference + same)
        lines.append(cells)
    return table(heads, lines)


def _rounds(rows: Sequence[Row], links: Sequence[float | None]) -> str:
    """How many timed steps the medians are of; older results do not say."""
    rounds = {row["link_mbit"]: row.get("rounds") for row in rows}
    if None in rounds.values():
        return ""
    of_link = ", ".join(f"{rounds[link]} at {link_of(link)}" for link in links)
    return f" Timed steps: {of_link}."


def checkpoint(result: Result) -> str | None:
    """Costs of a save, one line for every way to save; then the goals."""
    rows = [row for row in result["rows"] if "stall_ms" in row]
    if not rows:
        return None
    heads = ["", "training stands still", "complete after", "steps meanwhile", "memory"]
    lines = [
        [
            _name(row["row"]),
            _stall(row),
            f"{_median(row['total_ms'])} ms",
            "n/a" if row["slowdown_pct"] is None else f"{row['slowdown_pct']['median']:+.1f} %",
            "n/a" if row["memory_mb"] is None else f"{number(row['memory_mb'], 0)} MB",
        ]
        for row in rows
    ]
    goals = [
        [goal["name"], _with_unit(goal, "measured"), _with_unit(goal, "goal"), _met(goal)]
        for goal in result["meta"]["goals"]
    ]
    text = (
        f"A state of {result['meta']['state_mb']:.0f} MB in 96 tensors, medians of "
        f"{rows[0]['rounds']} interleaved rounds, one thread, local disk. Standing still: the "
        "call, and what the next optimizer step was held back. Steps meanwhile: how much longer "
        "small training steps take while it is written. Memory: of all processes."
    )
    return "\n\n".join(
        [
            table(heads, lines),
            table(["goal", "measured", "at most", ""], goals),
            caption(text, result),
        ]
    )


def crash_campaign(result: Result) -> str | None:
    """What was done to checkpoints, how often, and what went wrong."""
    rows = result["rows"]
    if not rows:
        return None
    problems = [key for key, value in rows[0].items() if isinstance(value, int) and key != "trials"]
    heads = ["", "trials", *problems]
    lines = [[row["kind"], *(f"{row[key]:,}" for key in heads[1:])] for row in rows]
    text = (
        "After every trial: the newest checkpoint that was reported complete, or a later one, is "
        "found and whole; damaged ones are detected; files of others are as they were; a resumed "
        "training ends with the same bits as one that was not disturbed. A trial counts under "
        f"every problem it had. {result['meta']['seconds'] / 60:.0f} minutes, seed "
        f"{result['meta']['seed']}."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _name(row: str) -> str:
    ours = row.removeprefix("ours ")
    return row if ours == row else f"ours, `{ours}`"


def _stall(row: Row) -> str:
    held = row["held_ms"]
    text = f"{_median(row['stall_ms'])} ms"
    return text if held is None else f"{text} + {_median(held)} ms"


def _median(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "n/a"
    value = figure["median"]
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _with_unit(goal: dict[str, Any], key: str) -> str:
    return f"{goal[key]:.2f}{'' if goal['unit'] in 'x%' else ' '}{goal['unit']}"


def _met(goal: dict[str, Any]) -> str:
    return "met" if goal["met"] else "missed"


_PROBLEM_NAMES = "hangs, lost or repeated samples, ranks that differ, weights that differ"


def campaign(result: Result) -> str | None:
    """One line per kind of fault."""
    rows = [row for row in result["rows"] if "struck" in row]
    if not rows:
        return None
    heads = ["fault", "trials", "met it", "broken", "to a new step", "at most"]
    lines = [
        [
            row["kind"],
            str(row["trials"]),
            str(row["struck"]),
            str(row["failed"]),
            _seconds(row["new_step_s"]),
            _seconds(row["new_step_max_s"]),
        ]
        for row in rows
    ]
    lines.append(["all", *(str(sum(row[key] for row in rows)) for key in _COUNTS), "", ""])
    seed = result["meta"]["seed"]
    text = (
        f"Small trainings of 1 to 4 ranks under torch's elastic agent, drawn at random from seed "
        f"{seed}. Broken would be: {_PROBLEM_NAMES}. To a new step: from the last fault to a step "
        "not done before, by ranks forked from a process that has imported everything; median. The "
        "20 s are of sharded checkpoints written on a thread, which waits for what the dead had to "
        "write; a writer process, the default, does not keep the survivors."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


_COUNTS = ("trials", "struck", "failed")


def loop_campaign(result: Result) -> str | None:
    """One line for all kinds of fault."""
    rows = [row for row in result["rows"] if "struck" in row]
    if not rows:
        return None
    each = [trial["recovery_s"] for row in rows for trial in row["each"]]
    found = [seconds for seconds in each if seconds is not None]
    heads = ["kinds of fault", "trials", "met it", "broken", "to a new step", "at most"]
    counts = [str(sum(row[key] for row in rows)) for key in _COUNTS]
    line = [str(len(rows)), *counts, _seconds(median(found)), _seconds(max(found))]
    text = (
        "`ElasticLoop` around plain DDP: the faults of the table above before the start, in "
        "passes, between `backward` and `step`, after steps and epochs, drawn at random from seed "
        f"{result['meta']['seed']}; judged in the same way."
    )
    return "\n\n".join([table(heads, [line]), caption(text, result)])


def figures(result: Result) -> str | None:
    """One line per way to come back."""
    rows = [row for row in result["rows"] if "recovery_s" in row]
    if not rows:
        return None
    heads = ["", "fault", "to the first new step", "samples redone", "every sample once"]
    lines = [
        [
            row["way"],
            row["fault"],
            _seconds(row["recovery_s"]),
            number(row["samples_redone"], 0),
            _exact(row),
        ]
        for row in rows
    ]
    text = (
        "Real torchrun, 2 ranks, a checkpoint every 10 steps, rank 1 struck after step 25; "
        "medians. The others are started again at once, as by somebody who waits for it."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def rendezvous(result: Result) -> str | None:
    """Jobs that came back, by backend and strategy."""
    rows = [row for row in result["rows"] if "finished" in row]
    if not rows:
        return None
    heads = ["rendezvous", "strategy", "finished", "failed", "hung", "median"]
    lines = [
        [
            row["backend"],
            f"`{row['strategy']}`",
            *(str(row[key]) for key in ("finished", "failed", "hung")),
            _seconds(row.get("median_s")),
        ]
        for row in rows
    ]
    text = (
        "Plain torchrun, 2 ranks; hung: still running at the bound. Median of those that finished."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def overhead(result: Result) -> str | None:
    """A step with and without the callback."""
    rows = [row for row in result["rows"] if "step_ms" in row]
    if not rows:
        return None
    heads = ["fit", "step", "least", "most"]
    lines = [
        [row["fit"], *(f"{number(row[key], 2)} ms" for key in ("step_ms", "least", "most"))]
        for row in rows
    ]
    text = (
        "2 ranks, medians of fits that take turns; least and most of the rounds; in the hooks: "
        "median, 5th and 95th percentile of all steps, the vote of all ranks included."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f} s"


def _exact(row: Row) -> str:
    if row["ids_exact"]:
        return "yes"
    return f"no: {row['samples_missed']:.0f} missed, {row['samples_twice']:.0f} twice"


def forms(result: Result) -> str | None:
    """Step times by form and codec."""
    rows = [row for row in result["rows"] if row["reason"] is None]
    tables = [_of_layout(rows, name) for name in dict.fromkeys(row["layout"] for row in rows)]
    if not tables:
        return None
    text = (
        "Median step of 10 x Linear(1024, 1024), 42 MB of gradients; MB that a host sends to "
        "others (interface) and to itself (loopback) in a step; % of the link: bytes over the "
        "link's rate, by the time that communication adds to the step. All ranks share two cores."
    )
    return "\n\n".join([*tables, caption(text, result)])


def _of_layout(rows: Sequence[Row], layout: str) -> str:
    of_layout = [row for row in rows if row["layout"] == layout]
    links = sorted({row["link_mbit"] for row in of_layout}, key=lambda mbit: mbit or float("inf"))
    shape = Layout.parse(layout)
    heads = [shape.title, "MB to others", "MB inside"]
    for link in links:
        heads += [f"{link_of(link)}: step", "faster than fp32 / fp16 hook", "% of the link"]
    lines = []
    for form, codec in dict.fromkeys((row["form"], row["codec"]) for row in of_layout):
        of_link = {
            row["link_mbit"]: row
            for row in of_layout
            if (row["form"], row["codec"]) == (form, codec)
        }
        first = next(iter(of_link.values()))
        name = name_of(codec) if form is None else f"{form} `{codec}`"
        mean_ranks = shape.world_size / shape.hosts
        cells = [name, megabytes(first["wire_bytes"] * mean_ranks), megabytes(first["lo_bytes"])]
        for link in links:
            row = of_link[link]
            silent = codec == "no-comm"
            faster = f"{row['speedup_vs_fp32']:.2f}x / {row['speedup_vs_fp16']:.2f}x"
            cells += [
                f"{row['step_ms_median']:,.0f} ms",
                "n/a" if silent else faster,
                number(row["wire_limit_pct"], 0),
            ]
        lines.append(cells)
    return table(heads, lines)


def curve(result: Result) -> str | None:
    """What the cost model says of more hosts."""
    rows = [row for row in result["rows"] if row["kind"] == "prediction"]
    if not rows:
        return None
    kinds = list(dict.fromkeys((row["form"], row["codec"]) for row in rows))
    heads = ["PREDICTION: hosts", *(f"{form} `{codec}`" for form, codec in kinds)]
    lines = []
    for hosts in dict.fromkeys(row["hosts"] for row in rows):
        of_kind = {(row["form"], row["codec"]): row for row in rows if row["hosts"] == hosts}
        found = [of_kind[kind] for kind in kinds]
        cells = [f"{r['predicted_ms']:,.0f} ms ({r['speedup_vs_flat_fp32']:.1f}x)" for r in found]
        lines.append([f"{hosts:,}", *cells])
    meta, errors = result["meta"], result["meta"]["errors"]
    text = (
        f"{meta['label']}: communication of a step of 42 MB, {rows[0]['ranks_per_host']} ranks per "
        f"host, {rows[0]['gbit']:g} Gbit/s per host, this machine's loopback inside and its CPUs "
        f"for the codecs, {rows[0]['round_us']:.0f} us per round between hosts (too few ranks to "
        f"tell). Error of the fit over {errors['rows']} measured rows: median "
        f"{errors['median'] * 100:.1f} %, largest {errors['largest'] * 100:.0f} %."
    )
    return f"{table(heads, lines)}\n\n<sub>{text}</sub>"


def errors(result: Result) -> str | None:
    """Each setting at each rate: what was measured, and the error of the prediction."""
    pairs = [row for row in result["rows"] if row["kind"] == "pair"]
    if not pairs:
        return None
    links = sorted({row["link_mbit"] for row in pairs})
    found = {(row["setting"], row["link_mbit"]): row for row in pairs}
    heads = ["gradients", *(f"{link:g} Mbit/s" for link in links)]
    lines = [
        [f"`{setting}`", *(_cell(found.get((setting, link))) for link in links)]
        for setting in dict.fromkeys(row["setting"] for row in pairs)
    ]
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
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _cell(row: dict[str, object] | None) -> str:
    if row is None:
        return "n/a"
    measured = f"{number(row['measured_ms'], 0)} ms"
    if row["is_base"]:
        return f"{measured} (the profile)"
    error = row["relative_error"]
    return f"{measured}, n/a" if error is None else f"{measured}, {100 * error:+.0f} %"


def scaling(result: Result) -> str | None:
    """What the same profile says of many hosts."""
    rows = [row for row in result["rows"] if row["kind"] == "scaling"]
    if not rows:
        return None
    hosts = sorted({row["hosts"] for row in rows})
    found = {(row["form"], row["codec"], row["hosts"]): row["step_ms"] for row in rows}
    heads = ["PREDICTION", *(f"{count:,} hosts" for count in hosts)]
    lines = [
        [f"`{codec}`", *(_ms(found[form, codec, count]) for count in hosts)]
        for form, codec in dict.fromkeys((row["form"], row["codec"]) for row in rows)
    ]
    text = (
        "Predicted, not measured: milliseconds of a step by the number of hosts, one rank each, "
        f"flat, at {result['meta']['base']['link_mbit']:g} Mbit/s, from the same profile of 2 "
        "hosts. `topk` gathers what every rank has sent: its bytes grow with the number of ranks."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _ms(value: float | None) -> str:
    return "n/a" if value is None else number(value, 0)
