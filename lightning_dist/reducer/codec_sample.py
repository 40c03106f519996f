"""Some elements of a gradient on their way: what was encoded, and what the payload says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_dist.accelerator import placed

_RUN = 4096
"""Elements that are drawn together: scattered ones cost more to read than to look at."""


@dataclass(frozen=True)
class CodecSample:
    """The same elements of four tensors, flat and in the compute dtype.

    All but the residual carry the GradScaler's scale.

    Args:
        gradient: as it was given to the codec and its memory.
        compensated: what was encoded: the gradient and what was still owed.
        sent: what the own payload says of ``compensated``, once the step is finished.
        residual: what is owed from now on, once the step is finished; None: nothing is kept.
    """

    gradient: Tensor
    compensated: Tensor
    sent: Callable[[], Tensor]
    residual: Callable[[], Tensor] | None


def sample_at(
    at: Tensor,
    gradient: Tensor,
    compensated: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    *,
    sent: Callable[[], Tensor],
) -> CodecSample:
    """The items ``at`` of a tensor whose state is not committed yet.

    Args:
        gradient: which ``compensated`` may have taken the place of.
    """
    chosen, kept = compensated[at], None
    given = gradient[at].to(chosen.dtype)
    if residual is not None:
        if gradient.data_ptr() == compensated.data_ptr():
            given = chosen - residual[at] * scale
        kept = partial(_items, residual, at)
    return CodecSample(given.flatten(), chosen.flatten(), sent, kept)


def _items(tensor: Tensor, at: Tensor) -> Tensor:
    return tensor[at].flatten()


class Sampler:
    """Draws runs of elements at random, the same ones for the same seed and the same questions.

    At random, because every n-th element says little of a codec that chooses among neighbours.
    torch's own generator is left alone.

    Args:
        share: of the elements, 0 to 1; with 1 or more it takes all.
    """

    def __init__(self, seed: int, *, share: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._share = share

    def items(self, count: int, *, of: int, device: torch.device) -> Tensor:
        """Which of ``count`` items of ``of`` elements each, ascending int64; at times none."""
        return placed(self.drawn(count, of=of), device)

    def drawn(self, count: int, *, of: int) -> Tensor:
        """The same on the host."""
        run = max(1, _RUN // of)
        runs = -(-count // run)
        # A part of a run is taken as often as it is large: few elements are seen as often as many.
        part = float(torch.rand((), generator=self._generator, device="cpu"))
        wanted = runs if self._share >= 1 else int(self._share * runs + part)
        order = torch.randperm(runs, generator=self._generator, device="cpu")
        first = order[:wanted].sort().values * run
        items = (first.unsqueeze(-1) + torch.arange(run, device="cpu")).flatten()
        return items[items < count]
