"""Tables of restarts: campaigns of faults, times, rendezvous, cost without faults."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness.tables import (
    Column,
    Row,
    Rows,
    Table,
    cell_of,
    measured,
)


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
    ("faults injected", "{struck}"),
    ("failures", "{failed}"),
]


CAMPAIGN = Table(
    has="struck",
    columns=[
        ("fault", "{kind}"),
        *_COUNTS,
        ("recovery time", partial(_seconds, key="new_step_s")),
        ("max", partial(_seconds, key="new_step_max_s")),
    ],
    lines=lambda rows: [*rows, {"kind": "all", **_sums(rows)}],
    text=lambda meta, rows: (
        "Small trainings of 1 to 4 ranks under torch's elastic agent, drawn at random from seed "
        f"{meta['seed']}. Failures: hangs, lost or repeated samples, ranks that differ, weights "
        "that differ. Recovery time: from the last fault to the first new step, by ranks forked "
        "from a process that has imported everything; median. The 20 s are of sharded checkpoints "
        "written on a thread, which waits for the shards of killed ranks; a writer process, the "
        "default, does not block the survivors."
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
        ("recovery time", "{median:.1f} s"),
        ("max", "{most:.1f} s"),
    ],
    text=lambda meta, rows: (
        "`ElasticLoop` around plain DDP: the faults of the table above before the start, in "
        "micro-batches, between `backward` and `step`, after steps and epochs, drawn at random "
        f"from seed {meta['seed']}; with the same checks."
    ),
)


RESUME = Table(
    has="recovery_s",
    columns=[
        ("", "{way}"),
        ("fault", "{fault}"),
        ("recovery time", "{recovery_s:.1f} s"),
        ("samples repeated", "{samples_redone:,.0f}"),
        ("every sample once", _exact),
    ],
    text="torchrun, 2 ranks, a checkpoint every 10 steps, a fault on rank 1 after step 25; "
    "medians. Without `ElasticRestart`, the job is restarted by hand, here immediately.",
)


def _restart_text(meta: Any, rows: Rows) -> str:
    text = (
        "`lightning-dist launch`, 2 ranks of one node, 1 M parameters, `int8`, steps of 20 ms of "
        "sleep, a checkpoint every 10 steps; ranks killed at random moments; medians. Until a step "
        "that had not been done before, by forks."
    )
    for row in (row for row in rows if row["kind"] == "first_start"):
        text += (
            f" A first start takes {row['recorded_s']:.1f} s to its first step, and "
            f"{row['usual_s']:.1f} s with `--no-preload` ({row['trials']} of each, in turns)."
        )
    return text + _renewed(meta, "restart")


RESTART = Table(
    kinds=("restart", "first_start"),
    lines=lambda rows: [row for row in rows if row["kind"] == "restart"],
    columns=[
        ("", "{way}"),
        ("trials", "{trials}"),
        ("kill to the first new step", "{new_s:.2f} s"),
        ("at most", "{new_max_s:.2f} s"),
    ],
    text=_restart_text,
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


def _ways(rows: Rows) -> list[Row]:
    """Recovery within the process first."""
    own = [
        {**row, "way": "recovery within the process", "next_s": row["left_s"]}
        | {"next_max_s": row["left_max_s"]}
        for row in rows
        if row["kind"] == "in_process"
    ]
    return [*own, *(row for row in rows if row["kind"] == "others")]


def _without_kills(meta: Any, rows: Rows) -> str:
    """What was measured beside kills, each in one sentence."""
    of = {row["kind"]: row for row in rows}
    costs = [row for row in rows if row["kind"] == "cost"]
    text = "3 ranks, 1 M parameters, steps of 20 ms of sleep; medians."
    if stopped := of.get("stopped"):
        text += (
            f" Of a rank that is stopped (SIGSTOP, {stopped['trials']} times) the others learn "
            f"after {stopped['detection_s']:g} s, and their next step ends "
            f"{stopped['undetected_s']:.2f} s later, at most {stopped['undetected_max_s']:.2f} s."
        )
    for cost in costs:
        text += (
            f" Without faults: {cost['with_ms']:.2f} ms a step of {cost['sleep_s']:g} s of sleep, "
            f'beside {cost["without_ms"]:.2f} ms with `recovery="restart"` and '
            f'{cost["deferred_ms"]:.2f} ms with that and `state_update="deferred"`.'
        )
    text += _renewed(meta, "cost")
    for row in (row for row in rows if row["kind"] == "goodput"):
        batches = f"{row['micro_batches']} micro-batch{'es' * (row['micro_batches'] > 1)}"
        text += (
            f" With 4 ranks, steps of {row['step_s']:.2f} s of {batches} and a kill every 2.75 s "
            f"({row['trials']} kills): {row['steps']} steps in {row['seconds']:.0f} s, "
            f"{row['steps_share']:.0%} of the {row['steps_without_kills']} without kills (at most "
            f"{row['bound']:.0%}, since a step is repeated after each kill), with "
            f"{row['mean_ranks']:.1f} ranks on average."
        )
    return text + _renewed(meta, "goodput")


def _renewed(meta: Any, kind: str) -> str:
    """When rows of a kind were measured, if it was after the others."""
    own = meta.get("renewed", {}).get(kind)
    return f" (These of {measured(own)}.)" if own else ""


IN_PROCESS_OTHERS = Table(
    kinds=("in_process", "others", "stopped", "cost", "goodput"),
    lines=_ways,
    columns=[
        ("", "{way}"),
        ("trials", "{trials}"),
        ("kill to the next step", "{next_s:.2f} s"),
        ("at most", "{next_max_s:.2f} s"),
    ],
    text=_without_kills,
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
