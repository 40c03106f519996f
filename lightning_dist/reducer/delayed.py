"""Means of the step before: a step gets them in the place of its own, which are still to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.reducer.plan.plans import Handle
from lightning_dist.reducer.plan.slices import ParameterSlice

_PIECE = 1 << 18  # elements that change places at once: a CPU allocates no second bucket for it


class DelayedMeans:
    """Memory in which gradients travel while the means of the step before are applied.

    Local gradients and the last means change places, so that one copy of the gradients is enough.
    Means are known by parameter: DDP rebuilds its buckets after the first backward pass.

    Args:
        first_step: the first one that gets means of another one; None: no step does.
    """

    def __init__(self, first_step: int | None) -> None:
        self._first_step = first_step
        self._memory: dict[int, tuple[Sequence[ParameterSlice], Tensor]] = {}
        self._means: dict[str, Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether any step gets means of another one."""
        return self._first_step is not None

    def swap(self, handle: Handle, *, step: int) -> Handle:
        """Handle to start instead of ``handle``: itself where means are not delayed.

        Else ``handle`` is done with the means of the step before, zeros in the first step, and the
        new one has the local gradients. Everything that was started before must have landed.
        """
        if self._first_step is None or step < self._first_step:
            return handle
        given, slices = handle.given, tuple(handle.slices)
        known = self._memory.get(handle.key)
        if known is not None and known[0] == slices and known[1].dtype == given.dtype:
            memory = known[1]
            piece = max(len(given), 1) if is_accelerator(given.device) else _PIECE
            halves = torch.split(given, piece), torch.split(memory, piece)
            for mine, last in zip(*halves, strict=True):
                local = mine.clone()
                mine.copy_(last)
                last.copy_(local)
        else:
            memory = given.clone()
            for part in slices:
                mean = self._means.get(part.name)
                part.of(given).zero_() if mean is None else part.of(given).copy_(mean)
                self._means[part.name] = part.of(memory)
            # DDP has rebuilt its buckets: free those that parameters have left.
            moved = {part.name for part in slices}
            self._memory = {
                key: known
                for key, known in self._memory.items()
                if moved.isdisjoint(part.name for part in known[0])
            }
            self._memory[handle.key] = slices, memory
        handle.done.set_result(given)
        return Handle(handle.key, memory, handle.slices, handle.absent)

    def state(self) -> dict[str, Tensor]:
        """The means that wait to be applied, ``{parameter name: (1, numel)}`` on the CPU."""
        return {name: mean.detach().cpu().clone()[None] for name, mean in self._means.items()}

    def load(self, means: Mapping[str, Tensor], *, numel: Mapping[str, int]) -> None:
        """Take over :meth:`state`, for the parameters that ``numel`` has, with their sizes."""
        self.clear()
        for name, mean in means.items() if self.active else ():
            if numel.get(name) == mean.shape[1]:
                self._means[name] = mean[0].clone()

    def clear(self) -> None:
        """Forget all means: the next step begins with zeros."""
        self._memory, self._means = {}, {}

    def to(self, device: torch.device) -> None:
        """Move the means, for instance off an accelerator after a fit."""
        self._memory = {}
        self._means = {name: mean.to(device, copy=True) for name, mean in self._means.items()}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(memory.nbytes for _, memory in self._memory.values())
