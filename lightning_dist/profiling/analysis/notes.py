"""Headline and notes of a summary: the sentences a reader needs beside its numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lightning_dist.profiling.analysis.breakdown import asks_again, passes_of
from lightning_dist.profiling.analysis.clock_quality import clock_notes
from lightning_dist.profiling.analysis.imbalance import growth_of
from lightning_dist.profiling.analysis.metrics import METRICS, format_value
from lightning_dist.profiling.analysis.parts import PhaseSkew, Summary
from lightning_dist.profiling.analysis.sample import Sample, spread
from lightning_dist.profiling.analysis.tables import StepTable, mean
from lightning_dist.profiling.analysis.traffic import ONE_HOST, is_one_host
from lightning_dist.profiling.run import Run

_LEAST = 0.005
"""Share of the step below which communication counts as hidden."""
_ENOUGH = 50
"""Steps of each rank that tell how often gradients travel."""
_OFTEN = 0.1
"""Share above which exchanges without a step are no accident, as those that a GradScaler skips."""
_LEAST_DIFFERENCE = 0.01
"""Share of a step below which detailed steps are said to be as long as all steps."""
_MOST_NAMED = 4
"""Of more ranks only the number is told."""


def headline(summary: Summary, *, of_steps: tuple[int, int] | None = None) -> str:
    """The most important figures, in one or two sentences.

    Args:
        of_steps: how many of how many steps count, where the rest has to be mentioned.
    """
    here, world_size = len(summary.ranks), summary.run.get("world_size", 0)
    found = [f"{here} of {world_size} ranks"] if 0 < here < world_size else []
    found += [f"{of_steps[0]} of {of_steps[1]} steps"] if of_steps is not None else []
    partial = f"Partial data ({', '.join(found)}): " if found else ""
    return f"{partial}{_measured(summary)}"


def _measured(summary: Summary) -> str:
    unavailable = summary.unavailable
    if not summary.steps:
        return f"No data: {unavailable.get('steps', 'no step was recorded')}."
    step = f"the step takes {_ms(summary.step_ms['mean'])}"
    if "breakdown_ms" in unavailable:
        return f"T{step[1:]}; its parts are unavailable: {unavailable['breakdown_ms']}."
    if summary.run.get("world_size", 1) < 2:
        return f"A single rank does not communicate; {step}."
    assert summary.exposed is not None
    assert summary.exposed_ms is not None
    if summary.exposed < _LEAST and summary.overlap_fraction is None:
        why = unavailable.get("overlap_fraction", "nothing was exchanged")
        return f"No communication: {why}; {step}."
    exposed = _ms(summary.exposed_ms)
    if summary.exposed < _LEAST:
        hidden = _ms(summary.hidden_ms)
        return (
            f"Communication is hidden: {hidden} under the backward pass, {exposed} exposed; {step}."
        )
    rank = summary.exposed_straggler
    names = {
        # Where waiting is not known, all of it may be in what counts as transfer.
        "exposed_transfer": (
            "transfer or unknown waiting" if "exposed_wait" in unavailable else "transfer"
        ),
        "exposed_wait": f"waiting for {'each other' if rank is None else f'rank {rank}'}",
        "exposed_codec": "codec",
        "exposed_other": "other",
    }
    shares = {name: (summary.breakdown_ms[name] or 0.0) / summary.exposed_ms for name in names}
    told = [
        f"{format_value(shares[name], '%')} {names[name]}"
        for name in names
        if shares[name] >= _LEAST
    ]
    share = format_value(summary.exposed, "%")
    return f"{share} of the step is exposed communication ({exposed}): {', '.join(told)}."


def _ms(value: float | None) -> str:
    return format_value(value, "ms")


def notes_of(
    run: Run,
    chosen: Sample,
    table: StepTable,
    *,
    phase_skew: Sequence[PhaseSkew],
    overhead: float | None,
    has_rates: bool,
) -> list[str]:
    """The most important first: what ended the training.

    Args:
        phase_skew: what ranks differ by outside of exchanges.
        overhead: share of the time that the profiler took; None: not known.
        has_rates: whether the summary has any of the network.
    """
    return [
        *_ended_by(run),
        *([f"buckets: n/a, {run.unseen}"] if run.unseen else []),
        *run.notes,
        *chosen.notes,
        *_outside(phase_skew, len(table.ranks)),
        *_exchanges(chosen),
        *_doubts(run, chosen, table),
        *_divergence(run),
        *_over_budget(run, overhead),
        *([ONE_HOST] if has_rates and is_one_host(run) else []),
    ]


def _ended_by(run: Run) -> list[str]:
    """Of a training that did not end by itself what ended it, as its ranks have noted."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in run.ranks.items():
        if each.end is not None and each.end.reason != "finished":
            ranks_of.setdefault(each.end.reason.rstrip(": "), []).append(rank)
    told = [
        f"{reason} (rank {', '.join(map(str, ranks))})" if len(ranks) < run.world_size else reason
        for reason, ranks in ranks_of.items()
    ]
    return [f"the training ended by {', '.join(told)}"] if told else []


def _outside(phase_skew: Sequence[PhaseSkew], ranks: int) -> list[str]:
    """Phases in which ranks differ, and who is late where that can be told."""
    if not phase_skew:
        return []
    phases = [
        f"{METRICS[each.phase].label} ({_who(each.ranks, ranks)}: +{_ms(each.excess_ms)})"
        for each in phase_skew
    ]
    note = (
        f"ranks differ: {', '.join(phases)}; waiting in collectives other than gradient "
        "exchanges (DDP buffers such as those of BatchNorm, `sync_dist=True`, your own) is "
        "counted in these phases"
    )
    first, *rest = phase_skew
    # Where the other ranks wait, the late one does not.
    if any(each.fastest_rank in first.ranks for each in rest):
        note += f"; late: {_who(first.ranks, ranks)} ({METRICS[first.phase].label})"
    return [note]


def _who(ranks: Sequence[int], of: int) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} of {of} ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"


def _exchanges(chosen: Sample) -> list[str]:
    """Whether gradients travel more often than an optimizer makes a step."""
    steps = spread(chosen.steps, _ENOUGH)
    records = [each.steps[step] for each in chosen.ranks.values() for step in steps]
    passes = [len(passes_of(record)) for record in records if record.buckets]
    stepped = sum(any(phase.name == "optimizer" for phase in each.phases) for each in records)
    if passes and mean(passes) >= 1 + _OFTEN:
        often = f"gradients are exchanged {mean(passes):.2g} times in a step of an optimizer"
        if any(map(asks_again, records)):
            return [
                f"{often} that evaluates its closure several times, as LBFGS does: each evaluation "
                "needs the mean over all ranks; LBFGS's `max_iter` and `max_eval` bound their "
                "number"
            ]
    elif 0 < stepped <= (1 - _OFTEN) * len(records):
        often = (
            f"after {stepped / len(records):.0%} of the exchanges of gradients an optimizer has "
            "made a step, and each exchange is a step here"
        )
    else:
        return []
    return [
        f"{often}: passes that only add up gradients need none, under `no_sync()` or with "
        "Lightning's `accumulate_grad_batches`"
    ]


def _doubts(run: Run, chosen: Sample, table: StepTable) -> list[str]:
    if not table.steps:
        return []
    doubts = [table.unknown_wait] if table.unknown_wait else []
    return [*doubts, *_others_differ(chosen, table.duration_ms), *clock_notes(run, table)]


def _others_differ(chosen: Sample, of_detailed: float) -> list[str]:
    """Whether steps in detail are longer or shorter than chance would have picked them."""
    durations = chosen.durations_ms()
    of_all, few, many = mean(durations), len(chosen.detailed), len(durations)
    if abs(of_detailed - of_all) <= _LEAST_DIFFERENCE * of_all:
        return []
    # Of a sample that is drawn without putting back; of one step it says nothing.
    error = statistics.stdev(durations) * math.sqrt((1 / few) - (1 / many))
    is_noise = few > 1 and abs(of_detailed - of_all) <= 2 * error
    if is_noise:
        return []
    why = "looking in detail takes time" if of_detailed > of_all else "it is no matter of chance"
    return [
        f"steps looked at in detail take {of_detailed:.1f} ms, and all steps {of_all:.1f} ms: "
        f"{why}, or they are other steps than the rest; parts are shares of {of_detailed:.1f} ms"
    ]


def _divergence(run: Run) -> list[str]:
    """Of the rank whose residual has grown the most."""
    growths = {rank: growth_of(each.errors) for rank, each in run.ranks.items()}
    found = {rank: growth for rank, growth in growths.items() if growth is not None}
    if not found:
        return []
    rank = max(found, key=lambda rank: found[rank].now)
    return [f"rank {rank}: {found[rank]}"]


def _over_budget(run: Run, overhead: float | None) -> list[str]:
    budget = min((each.metadata.budget for each in run.ranks.values()), default=0.0)
    if overhead is None or not 0 < budget < overhead:
        return []
    took, may = format_value(overhead, "%"), format_value(budget, "%")
    if took == may:
        return []
    note = f"the profiler took {took} of the time, and its budget is {may}"
    if run.is_stock:
        note += (
            ": gradients of ddp are seen through a communication hook, which costs its share in "
            "every step, however few are looked at in detail"
        )
    return [note]
