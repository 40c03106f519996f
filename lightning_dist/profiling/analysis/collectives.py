"""Spans of several ranks that are the same collective, and the rank that came to it last."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from msgspec.structs import replace

from lightning_dist.profiling.analysis.clock_quality import clock_of
from lightning_dist.profiling.analysis.parts import TimelineSpan
from lightning_dist.profiling.capture.events import Span
from lightning_dist.profiling.run import Run


def begin_of(run: Run, rank: int, step: int) -> int:
    """Begin of a step on a rank, on rank 0's clock.

    One offset serves all of a step, so that its times keep their distances.
    """
    of_rank = run.ranks[rank]
    begin = of_rank.head(step).begin
    return begin + of_rank.offset(begin)


def spans_of(run: Run, step: int) -> dict[int, list[TimelineSpan]]:
    """Spans of every rank that has recorded the step in detail, in their order.

    The same collective has the same group and order on all its members. Groups of one name are the
    same if their ranks are.
    """
    records = {
        rank: each.steps[step]
        for rank, each in run.ranks.items()
        if step in each.steps and each.head(step).detailed
    }
    spans = {rank: [_unknown(span) for span in of.spans] for rank, of in records.items()}
    groups: dict[tuple[str, tuple[int, ...]], int] = {}  # their numbers in this step
    collectives: dict[tuple[int, int], dict[int, int]] = {}  # index of the span on every rank
    for rank, record in records.items():
        own = {
            name: groups.setdefault((name, tuple(members)), len(groups))
            for name, members in run.ranks[rank].metadata.groups.items()
        }
        for index, span in enumerate(record.spans):
            if span.phase == "exchange" and span.group in own and span.order >= 0:
                collectives.setdefault((own[span.group], span.order), {})[rank] = index
    begins = {rank: begin_of(run, rank, step) for rank in records}
    clocks = {rank: clock_of(run, rank) for rank in records}
    members = [of for _, of in groups]
    for number, ((group, _), indices) in enumerate(collectives.items()):
        of_members = {rank: spans[rank][index] for rank, index in indices.items()}
        if missing := tuple(rank for rank in members[group] if rank not in indices):
            known = {rank: {"missing": missing} for rank in indices}
        else:
            known = _arrivals(of_members, begins, clocks)
        for rank, index in indices.items():
            spans[rank][index] = replace(of_members[rank], collective_id=number, **known[rank])
    return spans


def _unknown(span: Span) -> TimelineSpan:
    """A span of one rank, before it is compared with those of others."""
    times = span.begin, span.end
    return TimelineSpan(span.phase, span.bucket, *times, None, span.op, span.group, span.sent)


def _arrivals(
    spans: Mapping[int, TimelineSpan], begins: Mapping[int, int], clocks: Mapping[int, Hashable]
) -> dict[int, dict[str, Any]]:
    """Fields of a collective on every member.

    Args:
        begins: of the step, on rank 0's clock.
        clocks: of ranks; None: never compared.
    """
    of_members = {clocks[rank] for rank in spans}
    if len(spans) > 1 and None in of_members:
        # Without clocks: all leave a collective together, so who took longer has waited.
        begins = {rank: -span.end for rank, span in spans.items()}
    launches = {rank: begins[rank] + span.begin for rank, span in spans.items()}
    arrival = max(launches.values())
    last = min(rank for rank, launch in launches.items() if launch == arrival)
    over = max(begins[rank] + span.end for rank, span in spans.items())
    shortest = min(span.end - span.begin for span in spans.values())
    return {
        rank: {
            "arrival": arrival - begins[rank],
            "over": over - begins[rank],
            "last": last,
            # The root of a broadcast may leave it first: its duration says nothing.
            "shortest": shortest if len(of_members) > 1 and span.op != "broadcast" else None,
        }
        for rank, span in spans.items()
    }
