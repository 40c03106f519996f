"""The uint8 buffers that travel, their memory, and typed views of the planes that lie in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from lightning_dist.codecs.base import Payload, Plane

_ALIGN = 8  # every plane of every row starts at a multiple: typed views need it


def row_bytes(planes: Sequence[Plane], blocks: int) -> int:
    """Bytes of one row that holds ``blocks`` blocks of every plane, padding included."""
    return sum(_padded(plane.bytes_per_block * blocks) for plane in planes)


def views(buffer: Tensor, planes: Sequence[Plane], blocks: int) -> Payload:
    """Planes of ``buffer (rows, row_bytes)`` as tensors ``(rows, blocks, per_block)``.

    The views share the buffer's memory but not its storage object: torch.compile refuses to write
    to two views of different dtype that it can see to be of one storage, and these never overlap.
    """
    if not blocks:  # nothing that could be shared, at places that need not be aligned
        return tuple(buffer.new_empty((len(buffer), 0, p.per_block), dtype=p.dtype) for p in planes)
    payload = []
    start = 0
    for plane in planes:
        size = plane.bytes_per_block * blocks
        typed = buffer[:, start : start + size].view(plane.dtype)
        shaped = typed.view(len(buffer), blocks, plane.per_block)
        # On the meta device there is no memory, only sizes: a plan whose bytes are counted. By a
        # capsule: a tensor as the argument is refused on devices that torch itself does not have.
        payload.append(shaped if shaped.is_meta else from_dlpack(to_dlpack(shaped)))
        start += _padded(size)
    return tuple(payload)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class PayloadMemory:
    """uint8 buffers that are used again at the turn after the next.

    Tensors take turns with the memory of their payloads (one is decoded before the next but one is
    encoded), and so do consecutive units with that of the exchange inside a node, where
    ``staggered`` and ``decode_all`` let at most two work at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._turn = self._taken = 0

    def restart(self, turn: int | None = None) -> None:
        """Give out the memory of ``turn`` (0 or 1) from its beginning; None: the other one."""
        self._turn, self._taken = 1 - self._turn if turn is None else turn, 0

    def clear(self) -> None:
        """Give out new buffers from now on."""
        self._buffers = {}

    def take(self, size: int) -> Tensor:
        """Flat uint8 memory of ``size`` bytes, for the next exchange of the turn."""
        key, self._taken = (self._turn, self._taken), self._taken + 1
        found = self._buffers.get(key)
        if found is None or len(found) < size:  # exchanges of before keep the smaller one
            found = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._buffers[key] = found
        return found[:size]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
