"""Sentences of a summary: its headline, its notes, and why figures are unavailable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from lightning_dist.profiling.analysis.imbalance import growth_of
from lightning_dist.profiling.analysis.metrics import METRICS, format_value, in_ms
from lightning_dist.profiling.analysis.parts import PhaseSkew, Summary
from lightning_dist.profiling.analysis.tables import MS, Sample, StepTable
from lightning_dist.profiling.capture.events import FINISHED, PHASES
from lightning_dist.profiling.run import Run

ONE_NODE = (
    "all ranks are on one node: rates and link figures are those of loopback or shared memory, not "
    "of a network"
)

_COMMUNICATION = ("breakdown_ms", "exposed_ms", "hidden_ms", "exposed_wait")
_RATES = ("traffic.wire_gbps", "traffic.ddp_equivalent_busbw_gbps")
_NO_EXCHANGE = "no exchange was recorded"
_NO_LINK = "no link was measured"

_LEAST = 0.005
"""Share of the step below which communication counts as hidden."""
_OFTEN = 0.1
"""Share above which exchanges without a step are no accident, as those that a GradScaler skips."""
_MOST_GENERATIONS = 10
"""Most recent changes of members that are listed."""
_MOST_NAMED = 4
"""Number of ranks up to which they are named."""
_DOUBTFUL = 0.1
"""Share of an exchange by which clocks have to be uncertain to be mentioned."""


def headline(summary: Summary, *, cut: str = "") -> str:
    """The most important figures, in one or two sentences; ``cut``: such as ``"9 of 40 steps"``."""
    here, world_size = len(summary.ranks), summary.run.get("world_size", 0)
    ranks = f"{here} of {world_size} ranks" if 0 < here < world_size else ""
    part = ", ".join(filter(None, (ranks, cut)))
    return f"{f'Partial data ({part}): ' if part else ''}{_measured(summary)}"


def _measured(summary: Summary) -> str:
    unavailable = summary.unavailable
    if not summary.steps:
        return f"No data: {unavailable['steps']}."
    step = f"the step takes {in_ms(summary.step_ms['mean'])}"
    if summary.exposed_fraction is None or summary.exposed_ms is None:
        return f"T{step[1:]}; its parts are unavailable: {unavailable['breakdown_ms']}."
    if summary.run["world_size"] < 2:
        return f"A single rank does not communicate; {step}."
    exposed = in_ms(summary.exposed_ms)
    if summary.exposed_fraction < _LEAST and summary.overlap_fraction is None:
        return f"No communication: {unavailable['overlap_fraction']}; {step}."
    if summary.exposed_fraction < _LEAST:
        hidden = f"{in_ms(summary.hidden_ms)} under the backward pass"
        return f"Communication is hidden: {hidden}, {exposed} exposed; {step}."
    names = {
        # Where waiting is not known, all of it may be in what counts as transfer.
        "exposed_transfer": (
            "transfer or unknown waiting" if "exposed_wait" in unavailable else "transfer"
        ),
        "exposed_wait": "waiting",
        "exposed_codec": "codec",
        "exposed_other": "other",
    }
    shares = {name: (summary.breakdown_ms[name] or 0.0) / summary.exposed_ms for name in names}
    composition = ", ".join(
        f"{format_value(share, '%')} {names[name]}"
        for name, share in shares.items()
        if share >= _LEAST
    )
    share = format_value(summary.exposed_fraction, "%")
    straggler = f" Straggler: rank {rank}." if (rank := summary.straggler) is not None else ""
    return f"{share} of the step is exposed communication ({exposed}): {composition}.{straggler}"


def notes_of(run: Run, chosen: Sample, table: StepTable, summary: Summary) -> list[str]:
    """Notes, the most important first: what ended the training."""
    is_one_node = len({*run.nodes.values()}) == 1 and len(run.ranks) == run.world_size
    passes, optimizer_steps = table.of("passes"), table.of("optimizer_steps").sum()
    per_step = passes.sum() / max((passes > 0).sum(), 1)
    spare = (
        "passes that only accumulate gradients need no exchange; `no_sync()` or Lightning's "
        "`accumulate_grad_batches` avoids it"
    )
    uncompared = ", ".join(str(rank) for rank in run.ranks if run.clock_of(rank) is None)
    uncertainty = float(table.of("uncertainty").max(initial=0)) / MS
    exchange = table.total("moved") / max(table.total("exchanges"), 1) / MS
    rules = (
        (
            per_step >= 1 + _OFTEN,
            f"gradients are exchanged {per_step:.2g} times in a step of an optimizer: {spare}",
        ),
        (
            per_step < 1 + _OFTEN and 0 < optimizer_steps <= (1 - _OFTEN) * table.cells,
            f"an optimizer stepped after {optimizer_steps / max(table.cells, 1):.0%} of the "
            f"gradient exchanges, and each exchange counts as a step here: {spare}",
        ),
        (bool(table.unknown_wait), table.unknown_wait),
        (
            bool(table.steps and uncompared),
            f"no clock of rank {uncompared} was compared with rank 0's: waiting is estimated from "
            "the duration of exchanges",
        ),
        (
            uncertainty > _DOUBTFUL * exchange > 0,
            f"clocks are uncertain by {in_ms(uncertainty)} and an exchange takes "
            f"{in_ms(exchange)}: the split into waiting and transfer is uncertain",
        ),
    )
    growths = {rank: growth_of(rank_run.errors) for rank, rank_run in run.ranks.items()}
    growing = [(growth, rank) for rank, growth in growths.items() if growth is not None]
    growing.sort(key=lambda pair: -pair[0].now)
    return [
        *_ended_by(run),
        *(
            f"generation {generation.number} began at step {generation.step}: {generation.reason}"
            for generation in run.generations[-_MOST_GENERATIONS:]
        ),
        *([f"buckets: n/a, {run.unseen}"] if run.unseen else []),
        *run.notes,
        *chosen.notes,
        *_phase_skew(summary.phase_skew, len(table.ranks)),
        *(note for holds, note in rules if holds),
        *(f"rank {rank}: {growth}" for growth, rank in growing[:1]),
        *([ONE_NODE] if summary.traffic is not None and is_one_node else []),
    ]


def _ended_by(run: Run) -> list[str]:
    """Errors and signals that ended the training, in the order of their times.

    A rank that has lost its peer says nothing of why that peer went.
    """
    ends = {rank: rank_run.end for rank, rank_run in run.ranks.items() if rank_run.end is not None}
    times = {
        rank: math.inf if end.at is None else end.at + run.ranks[rank].offset(end.at)
        for rank, end in ends.items()
    }
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(ends, key=times.__getitem__):
        if ends[rank].reason != FINISHED:
            ranks_of.setdefault(ends[rank].reason.rstrip(": "), []).append(rank)
    endings = [
        f"{reason} (rank {', '.join(map(str, sorted(ranks)))})"
        if len(ranks) < run.world_size
        else reason
        for reason, ranks in ranks_of.items()
    ]
    return [f"the training ended by {', '.join(endings)}"] if endings else []


def _phase_skew(phase_skew: Sequence[PhaseSkew], ranks: int) -> list[str]:
    """Phases in which ranks differ, and the late rank where it can be identified."""
    if not phase_skew:
        return []
    phases = [
        f"{METRICS[skew.phase].label} ({_ranks(skew.ranks, ranks)}: +{in_ms(skew.excess_ms)})"
        for skew in phase_skew
    ]
    note = (
        f"ranks differ: {', '.join(phases)}; waiting in collectives other than gradient exchanges "
        "(DDP buffers such as those of BatchNorm, `sync_dist=True`, your own) is counted in these "
        "phases"
    )
    first, *rest = phase_skew
    # Where the other ranks wait, the late one does not.
    if any(skew.fastest_rank in first.ranks for skew in rest):
        note += f"; late: {_ranks(first.ranks, ranks)} ({METRICS[first.phase].label})"
    return [note]


def _ranks(ranks: Sequence[int], of: int) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} of {of} ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"


def unavailable_of(run: Run, chosen: Sample, table: StepTable, *, has_link: bool) -> dict[str, str]:
    """Reasons by field of the summary; all but that of the straggler."""
    none, is_alone = chosen.reason, run.world_size < 2
    alone = "one rank exchanges nothing" if is_alone else ""
    no_bucket = run.unseen or "no gradient bucket and no exchange was observed"
    no_traffic = "one rank sends nothing" if is_alone else "no gradient bucket was sent"
    no_codec = "DDP itself exchanges the gradients, without a codec" if run.is_stock else run.unseen
    missing = ", ".join(map(str, run.beside(table.ranks)))
    no_rank = (
        f"no steps of rank {missing} were recorded: its traffic is unknown, and waiting for it "
        "counts as transfer"
    )
    nested = "forward and backward pass overlap; both are in backward"
    whole = "with local updates, everything but the exchange is in other"
    exchanges, sends = table.total("exchange") > 0, table.total("raw", "intra", "inter") > 0
    has_links, has_errors = (
        any(getattr(rank_run, records) for rank_run in run.ranks.values())
        for records in ("links", "errors")
    )
    # Empty reasons count for nothing, and later ones replace earlier ones.
    rules = (
        ((*_COMMUNICATION, "traffic"), True, none),
        (("exposed_wait",), True, table.unknown_wait),
        (("step_ms", "profiler_overhead"), not chosen.steps, none),
        (("steps",), not chosen.steps, none if chosen.ranks else f"{none}: {_why_no_step(run)}"),
        (("buckets",), not table.buckets, none or alone or no_bucket),
        (_COMMUNICATION, table.has_no_exchange and not is_alone, no_bucket),
        (("exposed_codec",), not none, no_codec),
        (("forward",), not none and not table.total("forward"), nested),
        (PHASES, not none and run.sync_every > 0, whole),
        (("overlap_fraction",), not exchanges, none or alone or _NO_EXCHANGE),
        (("traffic",), not sends and not none, no_traffic),
        (_RATES, sends and not table.total("moving"), _NO_EXCHANGE),
        (_RATES, sends and bool(missing), no_rank),
        (("traffic.link_gbps",), sends and not has_link, _NO_LINK),
        (("errors",), not has_errors, no_codec or _no_errors(chosen)),
        (("links",), not has_links, _NO_LINK),
    )
    return {
        field: reason for fields, holds, reason in rules if holds and reason for field in fields
    }


def _why_no_step(run: Run) -> str:
    """Reason and remedy. The error or signal that ended a training is in a note."""
    endings = {rank_run.end.reason for rank_run in run.ranks.values() if rank_run.end is not None}
    if not endings:
        return "the training was killed in its first second, or has not made a step yet"
    if endings != {FINISHED}:
        return "the training ended before its first step was over"
    return "no optimizer has stepped with parameters of the model; profile a few steps or more"


def _no_errors(chosen: Sample) -> str:
    ranks, last = chosen.ranks.values(), chosen.detailed[-1:]
    buckets = (rank_run.steps[step].buckets for rank_run in ranks for step in last)
    is_whole = {bucket.codec for bucket in chain.from_iterable(buckets)} == {"none"}
    return "nothing is compressed" if is_whole else "none was sampled"
