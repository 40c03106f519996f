"""What a codec is: a pure pair of functions between gradients and the bytes that travel.

A codec knows tensors only. It never sees a process group, a parameter name or a clock, so it can be
tried in a notebook and every one of them can be put through the same laws (``tests/codecs``).

Shapes: gradients arrive as ``x (..., B, k)``: ``B`` blocks of ``k = codec.block`` elements, in the
compute dtype (float32, or float64 for float64 models). The payload is a tuple of *planes*, each
``(..., B, m)`` with ``m`` elements per block; the planes of one payload lie one after the other in
one uint8 buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

Payload: TypeAlias = tuple[Tensor, ...]
ExchangeName: TypeAlias = Literal["allreduce", "two_shot"]


@dataclass(frozen=True)
class Plane:
    """One typed part of a payload: ``per_block`` elements of ``dtype`` for every block."""

    dtype: torch.dtype
    per_block: int

    @property
    def bytes_per_block(self) -> int:
        return self.per_block * self.dtype.itemsize


@dataclass(frozen=True)
class Codec(ABC):
    """Gradient <-> wire bytes. Subclasses are frozen dataclasses of their hyperparameters.

    Class attributes that a subclass sets:

    ``name``
        what users write in ``codec="..."``.
    ``exchange``
        ``"allreduce"`` when payloads may be added by the network (the codec is linear),
        ``"two_shot"`` when they must be decoded before they are added.
    ``lossless``
        decode(encode(x)) == x, so there is never a residual.
    ``min_numel``
        tensors smaller than this, and 1-D ones, travel uncompressed unless the user says otherwise;
        0 compresses everything.
    ``keeps_residual``
        whether ``error_feedback="auto"`` means yes.
    """

    name: ClassVar[str]
    exchange: ClassVar[ExchangeName]
    lossless: ClassVar[bool] = False
    min_numel: ClassVar[int] = 0
    keeps_residual: ClassVar[bool] = False

    @property
    def block(self) -> int:
        """Elements that share side information and therefore stay together on one rank."""
        return 1

    @abstractmethod
    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        """Layout of the payload of gradients that DDP holds in ``dtype``."""

    @abstractmethod
    def encode(self, x: Tensor) -> Payload:
        """``x (..., B, block)`` -> one tensor ``(..., B, per_block)`` for each plane.

        Pure and deterministic; ``x`` is not changed. A value that is not finite must make the
        decoded block not finite: a GradScaler depends on seeing it.
        """

    @abstractmethod
    def decode(self, payload: Payload, dtype: torch.dtype) -> Tensor:
        """The payload of :meth:`encode` -> ``(..., B, block)`` in the compute dtype ``dtype``."""

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """Largest ``|decode(encode(x)) - x|`` that the codec promises, broadcastable to ``x``."""

    def finite(self, payload: Payload) -> Tensor:
        """0-d bool: whether every value behind ``payload`` was finite."""
        lowest, highest = payload[0].aminmax()
        return lowest.isfinite() & highest.isfinite()

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload of ``numel`` elements (the last block counts whole)."""
        blocks = -(-numel // self.block)
        return blocks * sum(plane.bytes_per_block for plane in self.planes(dtype))
