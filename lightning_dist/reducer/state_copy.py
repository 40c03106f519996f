"""Copy of the state of some parameters, for steps that are not applied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_dist.reducer.parts import Held
from lightning_dist.reducer.state import ReducerState


class StateCopy:
    """State of the parameters ``names`` on this rank, as it was at the last :meth:`take`.

    Its memory is used again by the next copy.
    """

    is_current = False
    """It was taken after the last step, and the next one has not begun."""

    def __init__(self, state: ReducerState, names: Sequence[str]) -> None:
        self._state, self._names = state, names
        self._held: Mapping[tuple[str, str], Held] = {}
        self._copies: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def take(self) -> None:
        """Copy the state."""
        self._held = self._state.held_of(self._names)
        for name in self._names:
            memory = [copy for _, copy in self._copies.get(name, ())]
            tensors = self._state.tensors(name)
            if [each.shape for each in memory] != [each.shape for each in tensors]:
                memory = [torch.empty_like(each) for each in tensors]
            self._copies[name] = list(zip(tensors, memory, strict=True))
            for tensor, copy in self._copies[name]:
                copy.copy_(tensor)

    def restore(self, names: Collection[str] | None = None) -> None:
        """Restore the state of ``names``, of all by default; also what was dropped since."""
        wanted = [name for name in self._names if names is None or name in names]
        self._state.hold({key: held for key, held in self._held.items() if key[1] in wanted})
        for tensor, copy in (pair for name in wanted for pair in self._copies[name]):
            tensor.copy_(copy)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for pairs in self._copies.values() for _, copy in pairs)
