"""The buckets that a run would have had with another ``bucket_cap_mb``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.whatif.simulate import BYTES, Bucket

SIZES = (5.0, 25.0, 100.0)
"""MB to ask about; 25 is DDP's own."""

_MB = 1 << 20
"""As DDP counts them."""

_ROUNDING = 1e-9
"""Sums of elements are not exact where a bucket of the run is a median, or a piece of one."""


def recut(buckets: Sequence[Bucket], cap_mb: float, *, begin: float) -> list[Bucket]:
    """Fill buckets of ``cap_mb`` with the gradients of a run, in the order in which they came.

    Gradients become ready evenly, by elements, between the times at which the run's own buckets
    were. As in DDP a bucket is closed by the parameter that fills it. How large parameters are a
    profile does not say: where a bucket of the run ended within half a cap, the new one ends too,
    so that the cap of the run gives the buckets of the run.

    Args:
        buckets: of the run, in order of ``ready``.
        cap_mb: 2**20 bytes each, as ``bucket_cap_mb`` of DDP; the first bucket has it too.
        begin: of the backward pass, seconds since the begin of the step.
    """
    assert cap_mb > 0
    ends = list(_ends([bucket.elements for bucket in buckets], cap_mb * _MB / BYTES))
    ready_at = _Readiness(buckets, begin)
    return [Bucket(ready_at(end), end - start) for start, end in pairwise([0.0, *ends])]


def _ends(sizes: Sequence[float], cap: float) -> Iterator[float]:
    """Elements before the end of each new bucket."""
    before = opened = 0.0  # elements before this bucket of the run, and in full new ones
    for size in sizes:
        end = before + size
        while end - opened >= cap * (1 - _ROUNDING):
            opened = end if end - opened < 1.5 * cap else opened + cap
            yield opened
        before = end
    if opened < before:
        yield before


class _Readiness:
    """When so many elements are ready."""

    def __init__(self, buckets: Sequence[Bucket], begin: float) -> None:
        self.points = [(0.0, min(begin, buckets[0].ready))]
        for bucket in buckets:
            self.points.append((self.points[-1][0] + bucket.elements, bucket.ready))

    def __call__(self, elements: float) -> float:
        for (left, since), (right, until) in pairwise(self.points):
            if elements <= right and right > left:
                return since + (until - since) * (elements - left) / (right - left)
        return self.points[-1][1]


def begin_of_gradients(record: StepRecord) -> int:
    """When the backward pass began that has filled the buckets: others before it only added up."""
    first = min((bucket.ready for bucket in record.buckets), default=record.duration)
    begins = [each.begin for each in record.phases if each.name == "backward"]
    return max((begin for begin in begins if begin <= first), default=first)
