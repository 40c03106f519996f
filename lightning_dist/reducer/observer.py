"""Who may watch a reducer work, and how it is told without the reducer knowing of clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from typing_extensions import override

from lightning_dist.exchange.channel import Watch
from lightning_dist.reducer.chunk import Lane

Phase = Literal["encode", "decode"]


class Observer(Watch):
    """Is told when things begin and end. Must be quick, and must not wait for anything.

    :meth:`ready` comes from the backward pass; all else from the thread or stream of the reducer.
    """

    done = False
    """Whether it has seen enough; it is told nothing more then."""

    def ready(self, bucket: int) -> None:
        """All gradients of a bucket are there."""

    def works(self, bucket: int, phase: Phase) -> Callable[[], None]:
        """The reducer begins to compute for a bucket; what is returned is called after that."""
        return _nothing

    def settled(self, buckets: Sequence[tuple[int, Sequence[Lane]]]) -> None:
        """The mean of all gradients of a step is there, and bytes are known."""

    @override
    def launched(self, op: str, *, group: str, sent: int) -> Callable[[], None]:
        return _nothing

    @override
    def waits(self) -> Callable[[], None]:
        return _nothing


@contextmanager
def working(observers: Sequence[Observer], bucket: int, phase: Phase) -> Iterator[None]:
    """While the reducer computes for a bucket."""
    with ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.works(bucket, phase))
        yield


def _nothing() -> None:
    pass
