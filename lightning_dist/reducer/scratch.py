"""Memory that exchanges take turns with."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class Buffers:
    """uint8 buffers by key, each as large as it ever had to be."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Hashable, Tensor] = {}

    def get(self, key: Hashable, size: int) -> Tensor:
        """The buffer of ``key``, of at least ``size`` bytes."""
        found = self._buffers.get(key)
        if found is None or len(found) < size:  # exchanges of before keep the smaller one
            found = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._buffers[key] = found
        return found

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Scratch:
    """Two sets of buffers, for consecutive units in turn.

    ``staggered`` and ``decode_all`` in ``unit.py`` let at most two units work inside a host at
    once.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffers = Buffers(device)
        self._turn = 0

    def take(self, *sizes: int) -> list[Tensor]:
        """For the next unit: uint8 buffers of at least ``sizes`` bytes each."""
        self._turn = 1 - self._turn
        return [self._buffers.get((self._turn, i), size) for i, size in enumerate(sizes)]

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes


class PayloadMemory:
    """Sets of buffers for the payloads of tensors that take turns with them.

    With two turns a tensor is decoded before the next but one is encoded.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffers = Buffers(device)
        self._turn = self._number = 0

    def restart(self, turn: int) -> None:
        """Give out the memory of ``turn`` from its begin; before every plan of a tensor."""
        self._turn, self._number = turn, 0

    def take(self, size: int) -> Tensor:
        """Flat uint8 memory of ``size`` bytes, for the next exchange of the tensor."""
        self._number += 1
        return self._buffers.get((self._turn, self._number), size)[:size]

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes
