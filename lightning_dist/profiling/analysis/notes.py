"""What a reader of a summary has to know beside its numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lightning_dist.profiling.analysis.breakdown import asks_again, passes_of
from lightning_dist.profiling.analysis.clock_quality import clock_notes
from lightning_dist.profiling.analysis.headline import longer, two_digits
from lightning_dist.profiling.analysis.imbalance import growth_of
from lightning_dist.profiling.analysis.parts import Uneven
from lightning_dist.profiling.analysis.sample import Sample, spread
from lightning_dist.profiling.analysis.tables import StepTable, mean
from lightning_dist.profiling.analysis.traffic import ONE_HOST, is_one_host
from lightning_dist.profiling.run import Run

_ENOUGH = 50
"""Steps of each rank that tell how often gradients travel."""
_OFTEN = 0.1
"""Share above which exchanges without a step are no accident, as those that a GradScaler skips."""
_LEAST_DIFFERENCE = 0.01
"""Share of a step below which steps in detail are said to be as long as all steps."""


def notes_of(
    run: Run,
    chosen: Sample,
    table: StepTable,
    *,
    uneven: Sequence[Uneven],
    overhead: float | None,
    has_rates: bool,
) -> list[str]:
    """The most important first: what ended the training.

    Args:
        uneven: what ranks differ by outside of exchanges.
        overhead: share of the time that the profiler took; None: not known.
        has_rates: whether the summary has any of the network.
    """
    return [
        *_ended_by(run),
        *([f"buckets: n/a, {run.unseen}"] if run.unseen else []),
        *run.notes,
        *chosen.notes,
        *_outside(uneven, len(table.ranks)),
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


def _outside(uneven: Sequence[Uneven], ranks: int) -> list[str]:
    """Whether ranks may wait where nobody sees it, and who is late then."""
    if not uneven:
        return []
    note = (
        f"{longer(uneven, of=ranks)}: ranks may wait there for each other, in collectives other "
        "than those of gradients (DDP's buffers, such as those of BatchNorm; `sync_dist=True`; "
        "your own), which are not counted as communication"
    )
    first, *rest = uneven
    if any(each.than in first.ranks for each in rest):  # where others wait, who is late does not
        note += f"; who is late is then rank {', '.join(map(str, sorted(first.ranks)))}, "
        note += f"by what it takes longer in {first.phase}"
    return [note]


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
    budget = min((each.about.budget for each in run.ranks.values()), default=0.0)
    if overhead is None or not 0 < budget < overhead:
        return []
    took, may = two_digits(overhead), two_digits(budget)
    if took == may:
        return []
    note = f"the profiler took {took} of the time, and its budget is {may}"
    if run.is_stock:
        note += (
            ": gradients of ddp are seen through a communication hook, which costs its share in "
            "every step, however few are looked at in detail"
        )
    return [note]
