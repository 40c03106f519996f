"""Figures that a summary cannot have, and why."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_dist.profiling.analysis.sample import Sample
from lightning_dist.profiling.analysis.tables import StepTable
from lightning_dist.profiling.run import Run

_COMMUNICATION = ("breakdown_ms", "exposed_ms", "hidden_ms", "exposed_wait")
_RATES = ("traffic.wire_gbps", "traffic.ddp_equivalent_busbw_gbps")
_NO_EXCHANGE = "no exchange was recorded"
_NO_LINK = "no link was measured"


def missing_ranks(run: Run, ranks: Iterable[int]) -> list[int]:
    """All other ranks of the run."""
    return sorted(set(range(run.world_size)) - set(ranks))


def unavailable_of(run: Run, chosen: Sample, table: StepTable, *, has_link: bool) -> dict[str, str]:
    """Reasons by field of the summary; all but that of the straggler.

    Args:
        has_link: the bandwidth of a link was measured.
    """
    none, is_alone = chosen.reason, run.world_size < 2
    alone = "one rank exchanges nothing" if is_alone else ""
    no_bucket = run.unseen or "no bucket of gradients was seen, nor an exchange"
    no_traffic = "one rank sends nothing" if is_alone else "no bucket of gradients was sent"
    no_codec = "DDP itself exchanges the gradients, without a codec" if run.is_stock else run.unseen
    missing = ", ".join(map(str, missing_ranks(run, table.ranks)))
    no_rank = (
        f"no step of rank {missing} is there: what it has sent is not known, and waiting for it "
        "counts as transfer"
    )
    nested = "the passes ran within each other; both are in backward"
    exchanges, sends = table.total("exchange") > 0, table.total("raw", "intra", "inter") > 0
    has_links, has_errors = (
        any(getattr(each, records) for each in run.ranks.values())
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
    endings = {each.end.reason for each in run.ranks.values() if each.end is not None}
    if not endings:
        return "the training was killed in its first second, or has not made a step yet"
    if endings != {"finished"}:
        return "the training ended before its first step was over"
    return (
        "no optimizer has made a step with parameters of the model; profile a training that makes "
        "a few"
    )


def _no_errors(chosen: Sample) -> str:
    last = [each.steps[step] for each in chosen.ranks.values() for step in chosen.detailed[-1:]]
    is_whole = {bucket.codec for step in last for bucket in step.buckets} == {"none"}
    return "nothing is compressed" if is_whole else "none was sampled"
