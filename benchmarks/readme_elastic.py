"""The tables about restarts: faults at random, what one costs, and a step without any."""

from __future__ import annotations

from statistics import median

from benchmarks.readme_markdown import Result, Row, caption, number, table

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
