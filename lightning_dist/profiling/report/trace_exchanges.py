"""The exchanges of a step as collectives: who took part, who came last, at what rates they sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_dist.profiling.analysis.parts import Placed, Timeline


@dataclass(frozen=True)
class Collective:
    """One exchange on every rank that is known to have taken part in it.

    Args:
        members: its span by rank.
    """

    members: Mapping[int, Placed]

    @property
    def last(self) -> int | None:
        """The rank that came last; None: it is not known, or not shown."""
        last = {span.last for span in self.members.values()}
        (rank,) = last if len(last) == 1 else (None,)
        return rank if rank in self.members else None


def collectives(timeline: Timeline) -> list[Collective]:
    """Those of one step."""
    found: dict[object, dict[int, Placed]] = {}
    for rank, spans in timeline.spans.items():
        for number, span in enumerate(spans):
            if span.phase == "exchange":
                key = (rank, number) if span.meeting is None else span.meeting
                found.setdefault(key, {})[rank] = span
    return [Collective(members) for members in found.values()]


def moves_from(span: Placed) -> int:
    """When an exchange no longer waited for others, as far as is known."""
    return span.begin if span.arrival is None else min(max(span.arrival, span.begin), span.end)


def mbit_per_s(span: Placed) -> float | None:
    """The rate at which an exchange sent once nobody was waited for; None: it took no time."""
    lasted = span.end - moves_from(span)
    return span.sent * 8000 / lasted if lasted > 0 else None


def rates(spans: Iterable[Placed]) -> list[tuple[int, dict[str, float]]]:
    """From when on a rank sends how many Mbit/s in each group, were every exchange even."""
    moving = [
        (moves_from(span), span.end, span.group, rate)
        for span in spans
        if span.phase == "exchange" and (rate := mbit_per_s(span))
    ]
    groups = sorted({group for _, _, group, _ in moving})
    return [
        (
            now,
            {
                group: sum(
                    rate for begin, end, of, rate in moving if of == group and begin <= now < end
                )
                for group in groups
            },
        )
        for now in sorted({time for begin, end, _, _ in moving for time in (begin, end)})
    ]
