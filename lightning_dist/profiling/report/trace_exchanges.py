"""The exchanges of a step as collectives: who took part, who came last, at what rates they sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_dist.profiling.parts import Placed, Timeline


@dataclass(frozen=True)
class Collective:
    """One exchange on every rank that is known to have taken part in it.

    Args:
        members: its span by rank.
    """

    members: Mapping[int, Placed]

    @property
    def last(self) -> int | None:
        """The rank that came last; None: two did, or it is not known."""
        last = [rank for rank, span in self.members.items() if span.begin == span.arrival]
        return last[0] if len(last) == 1 else None


def collectives(timeline: Timeline) -> list[Collective]:
    """Those of one step.

    A time line does not say which spans belong together. Those do that are alike and had their last
    member at the same nanosecond; should that be so in two groups, nobody has come last.
    """
    found: dict[tuple[object, ...], dict[int, Placed]] = {}
    for rank, spans in timeline.spans.items():
        for span in spans:
            if span.phase != "exchange":
                continue
            alike = (span.op, span.group, span.bucket, span.arrival)
            nth = 0
            while rank in found.setdefault((*alike, nth), {}):
                nth += 1
            found[*alike, nth][rank] = span
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
