"""The futures of means that DDP waits for when the backward pass is over."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from torch import Tensor
from torch.futures import Future, collect_all

_MOST = 4 << 20
"""Bytes that are held. DDP copies a mean into its gradients while the next ones travel; those that
are held until the last has arrived are copied after that, which takes less than a millisecond."""

Reduced: TypeAlias = "Future[list[Tensor]]"


class Promises:
    """Has them completed by the thread of the backward pass where that is possible.

    A callback runs in a thread of gloo, which is none of the interpreter's and has to become one:
    that takes longer than all the rest of a hook. So the hook of a later bucket completes what has
    arrived before it, and one callback, with the last bucket, what is left.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[Reduced, Future[Tensor], Tensor]] = deque()
        self._bytes = 0

    def make(
        self, gradients: Tensor, reduced: Reduced, *, is_first: bool, is_last: bool
    ) -> Future[Tensor]:
        """The promise of the mean of a bucket: ``gradients``, when ``reduced`` is done.

        Args:
            is_first: of its backward pass; the one before may have failed half way.
        """
        if is_first:
            self._held.clear()
            self._bytes = 0
        self._complete()
        if is_last:
            return self._complete_with(gradients, reduced)
        if not gradients.is_cpu or gradients.is_sparse or self._bytes + gradients.nbytes > _MOST:
            return _after(reduced, gradients)
        self._bytes += gradients.nbytes
        promise: Future[Tensor] = Future()
        self._held.append((reduced, promise, gradients))
        return promise

    def _complete(self) -> None:
        """Those whose means have arrived, in order."""
        while self._held and self._held[0][0].done():
            reduced, promise, gradients = self._held[0]
            try:
                reduced.value()
            except RuntimeError:
                return  # the last one will tell
            promise.set_result(gradients)
            self._bytes -= gradients.nbytes
            self._held.popleft()

    def _complete_with(self, gradients: Tensor, reduced: Reduced) -> Future[Tensor]:
        """The last promise. It completes the others too, when all are there or one has failed."""
        held, self._held = self._held, deque()
        if not held:
            return _after(reduced, gradients)

        def arrived(all_of_them: Future[list[Reduced]]) -> Tensor:
            for _, promise, mean in held:
                promise.set_result(mean)  # also where it has failed: DDP would wait for ever
            all_of_them.value()
            return gradients

        last: Future[Tensor]
        last = collect_all([*(each for each, _, _ in held), reduced]).then(arrived)
        return last


def _after(reduced: Reduced, gradients: Tensor) -> Future[Tensor]:
    def arrived(done: Reduced) -> Tensor:
        done.value()  # raises where it has failed
        return gradients

    promise: Future[Tensor] = reduced.then(arrived)
    return promise
