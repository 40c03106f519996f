"""Memory that chunks take turns with."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Two sets of buffers, for consecutive chunks in turn.

    ``begun`` and ``settle_all`` in ``chunk.py`` let at most two chunks work inside a host at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def take(self, *sizes: int) -> list[Tensor]:
        """For the next chunk: uint8 buffers of at least ``sizes`` bytes each."""
        self._turn = 1 - self._turn
        return [self._buffer((self._turn, i), size) for i, size in enumerate(sizes)]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _buffer(self, key: tuple[int, int], size: int) -> Tensor:
        found = self._buffers.get(key)
        if found is None or len(found) < size:  # chunks of before keep the smaller one
            found = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._buffers[key] = found
        return found
