"""Figures that a summary cannot have, and why."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

from lightning_dist.profiling.run import Run

if TYPE_CHECKING:  # which name a reason themselves
    from lightning_dist.profiling.analysis.sample import Sample
    from lightning_dist.profiling.analysis.tables import StepTable


class Unavailable(StrEnum):
    """Reasons why a figure is None; what is in braces is filled in where one is given."""

    NO_STEP = "no rank has recorded a step"
    KILLED = "the training was killed in its first second, or has not made a step yet"
    ENDED = "the training ended before its first step was over"
    NO_OPTIMIZER_STEP = (
        "no optimizer has made a step with parameters of the model; profile a training that makes "
        "a few"
    )
    NO_COMMON_STEP = "no step is recorded on all ranks"
    NO_DETAIL = "no step is recorded in detail on all ranks"
    NO_STEP_OF_RANK = (
        "no step of rank {ranks} is there: what it has sent is not known, and waiting for it "
        "counts as transfer"
    )
    NO_RECORD = "exchanges without a record of rank {ranks} count as transfer, waiting included"
    NO_MEMBERS = "exchanges that do not say who takes part count as transfer, waiting included"
    NO_BUCKET = "no bucket of gradients was seen, nor an exchange"
    NO_EXCHANGE = "no exchange was recorded"
    NO_LINK = "no link was measured"
    NOT_SENT = "no bucket of gradients was sent"
    NOT_SAMPLED = "none was sampled"
    NOT_COMPRESSED = "nothing is compressed"
    STOCK = "DDP itself exchanges the gradients, without a codec"
    ALONE = "one rank exchanges nothing"
    ALONE_SENDS = "one rank sends nothing"
    IN_BACKWARD = "the passes ran within each other; both are in backward"
    NO_WAITING = "no rank waited"
    LITTLE_WAITING = "waiting is {share:.1%} of the step"
    NOT_MOST = "no rank is clearly the last: only {share:.0%} of it is for rank {rank}, the most"
    UNCERTAIN = (
        "no rank is clearly the last: clocks are no more certain than what rank {rank} was late"
    )
    CHANCE = (
        "no rank is clearly the last: rank {rank} was late in too few steps to tell it from chance"
    )
    UNEVEN = "ranks are uneven outside of exchanges too, and by more"


_COMMUNICATION = ("breakdown_ms", "exposed_ms", "hidden_ms", "exposed_wait")
_RATES = ("traffic.wire_gbps", "traffic.ddp_equivalent_busbw_gbps")


def missing_ranks(run: Run, ranks: Iterable[int]) -> list[int]:
    """All other ranks of the run."""
    return sorted(set(range(run.world_size)) - set(ranks))


def unavailable_of(run: Run, chosen: Sample, table: StepTable, *, has_link: bool) -> dict[str, str]:
    """Reasons by field of the summary; all but that of the straggler.

    Args:
        has_link: the bandwidth of a link was measured.
    """
    none = chosen.reason or ""
    alone = Unavailable.ALONE if run.world_size < 2 else ""
    no_bucket = run.unseen or Unavailable.NO_BUCKET
    missing = ", ".join(map(str, missing_ranks(run, table.ranks)))
    sends = table.total("raw", "intra", "inter") > 0
    reasons: dict[str, str] = {}
    # A reason stands for a field if it is not empty; later ones go before earlier ones.
    for fields, reason in (
        ((*_COMMUNICATION, "traffic"), none),
        (("exposed_wait",), table.unknown_wait),
        (("step_ms", "profiler_overhead"), "" if chosen.steps else none),
        (("steps",), "" if chosen.steps else chosen.whole_reason),
        (("buckets",), "" if table.buckets else none or alone or no_bucket),
        (_COMMUNICATION, no_bucket if table.has_no_exchange and not alone else ""),
        (("exposed_codec",), "" if none else _no_codec(run)),
        (("forward",), "" if none or table.total("forward") else Unavailable.IN_BACKWARD),
        (
            ("overlap_fraction",),
            "" if table.total("exchange") else none or alone or Unavailable.NO_EXCHANGE,
        ),
        (
            ("traffic",),
            "" if sends or none else Unavailable.ALONE_SENDS if alone else Unavailable.NOT_SENT,
        ),
        (_RATES, Unavailable.NO_EXCHANGE if sends and not table.total("moving") else ""),
        (_RATES, Unavailable.NO_STEP_OF_RANK.format(ranks=missing) if sends and missing else ""),
        (("traffic.link_gbps",), "" if has_link or not sends else Unavailable.NO_LINK),
        (("errors",), _no_errors(run, chosen)),
        (("links",), "" if any(x.links for x in run.ranks.values()) else Unavailable.NO_LINK),
    ):
        if reason:
            reasons |= dict.fromkeys(fields, reason)
    return reasons


def _no_codec(run: Run) -> str:
    """Reason why no work of a codec can be seen."""
    return Unavailable.STOCK if run.is_stock else run.unseen


def _no_errors(run: Run, chosen: Sample) -> str:
    if any(each.errors for each in run.ranks.values()):
        return ""
    last = [each.steps[step] for each in chosen.ranks.values() for step in chosen.detailed[-1:]]
    is_whole = {bucket.codec for step in last for bucket in step.buckets} == {"none"}
    return _no_codec(run) or (Unavailable.NOT_COMPRESSED if is_whole else Unavailable.NOT_SAMPLED)
