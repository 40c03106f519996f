"""Memory of payloads, with which exchanges take turns."""

from __future__ import annotations

import torch
from torch import Tensor


class PayloadMemory:
    """uint8 buffers that are used again at the turn after the next.

    Tensors take turns with the memory of their payloads (one is decoded before the next but one is
    encoded), and so do consecutive units with that of the exchange inside a host, where
    ``staggered`` and ``decode_all`` let at most two work at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._turn = self._taken = 0

    def restart(self, turn: int | None = None) -> None:
        """Give out the memory of ``turn`` (0 or 1) from its beginning; None: the other one."""
        self._turn, self._taken = 1 - self._turn if turn is None else turn, 0

    def take(self, size: int) -> Tensor:
        """Flat uint8 memory of ``size`` bytes, for the next exchange of the turn."""
        key, self._taken = (self._turn, self._taken), self._taken + 1
        found = self._buffers.get(key)
        if found is None or len(found) < size:  # exchanges of before keep the smaller one
            found = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._buffers[key] = found
        return found[:size]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
