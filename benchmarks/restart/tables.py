"""Tables of restarts: campaigns of faults, times, rendezvous, cost without faults."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness.tables import Column, Row, Rows, Table, cell_of


def _exact(row: Row) -> str:
    if row["ids_exact"]:
        return "yes"
    return f"no: {row['samples_missed']:.0f} missed, {row['samples_twice']:.0f} twice"


def _seconds(row: Row, *, key: str) -> str:
    """Nothing for the sum of all rows."""
    return cell_of(("", f"{{{key}:.1f}} s"), row) if key in row else ""


def _sums(rows: Rows) -> dict[str, Any]:
    return {key: sum(row[key] for row in rows) for key in ("trials", "struck", "failed")}


_COUNTS: list[Column] = [
    ("trials", "{trials}"),
    ("met it", "{struck}"),
    ("broken", "{failed}"),
]


CAMPAIGN = Table(
    has="struck",
    columns=[
        ("fault", "{kind}"),
        *_COUNTS,
        ("to a new step", partial(_seconds, key="new_step_s")),
        ("at most", partial(_seconds, key="new_step_max_s")),
    ],
    lines=lambda rows: [*rows, {"kind": "all", **_sums(rows)}],
    text=lambda meta, rows: (
        "Small trainings of 1 to 4 ranks under torch's elastic agent, drawn at random from seed "
        f"{meta['seed']}. Broken would be: hangs, lost or repeated samples, ranks that differ, "
        "weights that differ. To a new step: from the last fault to a step not done before, by "
        "ranks forked from a process that has imported everything; median. The 20 s are of sharded "
        "checkpoints written on a thread, which waits for what the dead had to write; a writer "
        "process, the default, does not keep the survivors."
    ),
)


def _all_kinds(rows: Rows) -> list[Row]:
    """One line for all kinds of fault."""
    found = [seconds for row in rows for seconds in row["recoveries_s"]]
    return [{"kinds": len(rows), **_sums(rows), "median": median(found), "most": max(found)}]


LOOP_CAMPAIGN = Table(
    has="struck",
    lines=_all_kinds,
    columns=[
        ("kinds of fault", "{kinds}"),
        *_COUNTS,
        ("to a new step", "{median:.1f} s"),
        ("at most", "{most:.1f} s"),
    ],
    text=lambda meta, rows: (
        "`ElasticLoop` around plain DDP: the faults of the table above before the start, in "
        "passes, between `backward` and `step`, after steps and epochs, drawn at random from seed "
        f"{meta['seed']}; judged in the same way."
    ),
)


FIGURES = Table(
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


IN_PROCESS = Table(
    has="left_s",
    columns=[
        ("trials", "{trials}"),
        ("kill to the next step of the others", "{left_s:.2f} s"),
        ("at most", "{left_max_s:.2f} s"),
        ("kill to the first step with a new rank", "{joined_s:.1f} s"),
        ("pause of the others", "{pause_s:.2f} s"),
        ("at most", "{pause_max_s:.2f} s"),
    ],
    text='`ElasticLoop(recovery="in_process")` around DDP on one node, 3 ranks, 1 M parameters, '
    "`int8`, steps of 20 ms of sleep; ranks killed at random moments; medians.",
)


STOPPED = Table(
    has="undetected_s",
    columns=[
        ("ranks stopped", "{trials}"),
        ("detection", "{detection_s:.0f} s"),
        ("beyond it, to the next step of the others", "{undetected_s:.2f} s"),
        ("at most", "{undetected_max_s:.2f} s"),
    ],
    text="The same training; ranks stopped by SIGSTOP, known by the beats that do not come. "
    "Less than 0 s: the last beat was before the stop.",
)


OTHERS = Table(
    has="next_s",
    columns=[
        ("", "{way}"),
        ("ranks killed", "{trials}"),
        ("kill to the next step", "{next_s:.2f} s"),
        ("at most", "{next_max_s:.2f} s"),
    ],
    text="3 ranks of the same model in the same run; with torchrun a checkpoint every 50 steps. "
    "`torchft`: replicas of one rank.",
)


WITHOUT_FAULTS = Table(
    has="cost",
    columns=[
        ("step with a restart of all", "{without_ms:.2f} ms"),
        ("step with recovery in the process", "{with_ms:.2f} ms"),
        ("difference", "{cost:+.1%}"),
    ],
    text="2 ranks, steps with 50 ms of sleep, medians of jobs that take turns.",
)


GOODPUT = Table(
    has="steps_share",
    columns=[
        ("ranks killed, one every 2.75 s", "{trials}"),
        ("steps done of those that would have fit", "{steps_share:.1%}"),
        ("ranks on the average", "{mean_ranks:.2f} of 4"),
    ],
    text='Steps of 0.5 s; `batch_policy="fixed_micro_batch"`, so that a step takes as long with '
    "fewer ranks.",
)


RENDEZVOUS = Table(
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


OVERHEAD = Table(
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
