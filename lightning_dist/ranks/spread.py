"""A tensor of a state whose elements lie on different ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """A tensor of which each rank has parts.

    Args:
        whole: stands for the tensor in a state, on all ranks: its shape and dtype. Its memory is
            not filled, and never read.
        own: contiguous parts that this rank has, with the element of ``whole`` at which each
            starts. What no rank has is zero.
        complete: whether it is an error that no rank has an element.
    """

    whole: Tensor
    own: tuple[tuple[int, Tensor], ...]
    complete: bool = False

    def runs(self) -> list[tuple[int, Tensor]]:
        """The parts with the byte at which they start, in order."""
        size = self.whole.element_size()
        return [(start * size, part) for start, part in sorted(self.own, key=lambda own: own[0])]
