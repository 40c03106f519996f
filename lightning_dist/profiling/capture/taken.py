"""What a recorder has taken of a step, before its times are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from lightning_dist.profiling.capture.events import BucketTimes, Span
from lightning_dist.reducer.moments import Moment, Moments

Row: TypeAlias = tuple[str, int, Moment, Moment, str, str, int, int]
"""Of a span, in the order of its fields: making a frozen dataclass takes several times longer."""


@dataclass(frozen=True)
class Taken:
    """Buckets and spans of a step, at moments that may be to come.

    Args:
        ready: buckets, when their gradients were there.
        done: buckets, with a moment between their gradients and those of the next pass, and when
            their means were there; the times within them do not count.
    """

    ready: Sequence[tuple[int, Moment]]
    done: Sequence[tuple[Moment, Moment, BucketTimes]]
    spans: Sequence[Row]

    @property
    def last(self) -> Iterator[Moment]:
        """When these are past, all of it can be read."""
        yield from (moment for _, moment, _ in self.done)
        yield from (row[3] for row in self.spans)

    def read(
        self, moments: Moments, *, since: Moment, begin: int | None = None
    ) -> tuple[tuple[BucketTimes, ...], tuple[Span, ...]]:
        """The same in nanoseconds from ``begin`` on; all of it is past.

        Args:
            since: the first moment of the step.
            begin: None: when that was.
        """
        if begin is None:
            (begin,) = moments.read([since], since=since)
        readies = moments.read([moment for _, moment in self.ready], since=since)
        laters = moments.read([moment for moment, _, _ in self.done], since=since)
        dones = moments.read([moment for _, moment, _ in self.done], since=since)
        begins = moments.read([row[2] for row in self.spans], since=since)
        ends = moments.read([row[3] for row in self.spans], since=since)
        return self._buckets(begin, readies, laters, dones), self._spans(begin, begins, ends)

    def _buckets(
        self, step: int, readies: Sequence[int], laters: Sequence[int], dones: Sequence[int]
    ) -> tuple[BucketTimes, ...]:
        # Of a pass that failed and was tried again the last counts: it has the means.
        ready: dict[int, list[int]] = {}
        for (index, _), at in zip(self.ready, readies, strict=True):
            ready.setdefault(index, []).append(at)
        both = []
        for (_, _, each), later, at in zip(self.done, laters, dones, strict=True):
            before = [begin for begin in ready.get(each.index, ()) if begin <= later]
            if before:
                both.append((before[-1], at, each))
        return tuple(
            [
                BucketTimes(
                    each.index,
                    begin - step,
                    end - step,
                    each.raw,
                    each.intra,
                    each.inter,
                    each.codec,
                )
                for begin, end, each in sorted(both, key=itemgetter(0))
            ]
        )

    def _spans(self, step: int, begins: Sequence[int], ends: Sequence[int]) -> tuple[Span, ...]:
        placed = zip(begins, ends, self.spans, strict=True)
        return tuple(
            [
                Span(phase, bucket, begin - step, end - step, op, group, sent, order)
                for begin, end, (phase, bucket, _, _, op, group, sent, order) in sorted(
                    placed, key=itemgetter(0)
                )
            ]
        )
