"""Codecs: pure pairs of functions between gradients and payloads.

A codec knows tensors only. It never sees a process group or a clock, so it can be tried in a
notebook and every one of them can be put through the same laws (``tests/codecs``).

Most are a :class:`BlockCodec`: gradients arrive as ``x (..., B, k)``: ``B`` blocks of
``k = codec.block`` elements, in the compute dtype (float32, or float64 for float64 models). The
payload is a tuple of *planes*, each ``(..., B, m)`` with ``m`` elements per block; the planes of
one payload lie one after the other in one uint8 buffer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dist.codecs.memory import ErrorFeedback, Memory, NoMemory
from lightning_dist.codecs.noise import block_keys

Payload: TypeAlias = tuple[Tensor, ...]
Shape: TypeAlias = tuple[int, ...]
ExchangeName: TypeAlias = Literal["allreduce", "two_shot", "gather"]


@dataclass(frozen=True)
class Plane:
    """One typed part of a payload: ``per_block`` elements of ``dtype`` for every block."""

    dtype: torch.dtype
    per_block: int

    @property
    def bytes_per_block(self) -> int:
        return self.per_block * self.dtype.itemsize


@dataclass(frozen=True)
class Native:
    """Passes of a codec in ``kernels/native.cpp``, and the options that they take."""

    functions: str  # their names begin with it
    planes: tuple[str, ...]  # of the payload, as the C++ calls them
    values: torch.dtype
    k: int  # elements that are sent of every block
    gain: float = 1.0  # what is sent -> what it stands for


@dataclass(frozen=True)
class Codec(ABC):
    """Base class of codecs. Subclasses are frozen dataclasses of their hyperparameters.

    Class attributes that a subclass sets:

    ``name``
        what users write in ``codec="..."``.
    ``use``
        what it is for, in a line of ``lightning-dist codecs``.
    ``exchange``
        ``"allreduce"`` when payloads may be added by the network (the codec is linear),
        ``"two_shot"`` when they must be decoded before they are added, ``"gather"`` when even the
        sum is sent as it is, one payload after the other (sparse codecs).
    ``lossless``
        decode(encode(x)) == x, so there is never a residual.
    ``min_numel``
        tensors smaller than this, and 1-D ones, travel uncompressed unless the user says otherwise;
        0 compresses everything.
    ``keeps_residual``
        whether ``error_feedback="auto"`` means yes.
    ``bit_exact``
        whether every machine decodes the same bytes to the same bits.
    ``contraction``
        whether the codec loses less than it is given, without which error feedback diverges.
    ``whole_tensors``
        whether tensors must not be divided among the ranks of a host, because the codec looks at
        their shape: one of the ranks then takes each of them as it is.
    ``keeps_factors``
        whether the codec's communication unit keeps two factors of each tensor between steps, equal
        on all ranks, as that of ``powersgd``.
    """

    name: ClassVar[str]
    use: ClassVar[str] = ""
    exchange: ClassVar[ExchangeName]
    lossless: ClassVar[bool] = False
    min_numel: ClassVar[int] = 0
    keeps_residual: ClassVar[bool] = False
    bit_exact: ClassVar[bool] = True
    fusable: ClassVar[bool] = False  # whether its passes can be compiled
    whole_tensors: ClassVar[bool] = False
    keeps_factors: ClassVar[bool] = False

    @property
    def contraction(self) -> bool:
        return True

    @property
    def momentum_correction(self) -> float:
        """Momentum of the local gradients before they are compressed; 0 for none."""
        return 0.0

    @property
    def local_clip(self) -> float:
        """Norm of the sum of all ranks' gradients of a tensor to which each rank clips; 0: none."""
        return 0.0

    @property
    def accepts(self) -> tuple[str, str] | None:
        """The tensors that are compressed and what makes them more, in words; said if none is."""
        return None

    @property
    def elementwise(self) -> bool:
        """Whether each element is encoded alone, so that tensors may be encoded as one."""
        return False

    @property
    def block(self) -> int:
        """Elements that are encoded together and stay on one rank; 0: those of a tensor."""
        return 0

    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        """The memory of the codec under the user's wish; ``"auto"`` is :attr:`keeps_residual`."""
        keeps = self.keeps_residual if error_feedback == "auto" else error_feedback
        return ErrorFeedback() if keeps and not self.lossless else NoMemory()

    def inside_host(self) -> BlockCodec | None:
        """The codec as the one inside hosts, where gradients are only cast; None: it does more."""
        return None

    def of_parameters(self) -> BlockCodec | None:
        """The codec as one of tensors that are gathered whole; None: it keeps something."""
        return None

    def of_shards(self) -> BlockCodec | None:
        """The codec as one of rows that ranks decode alone; None: it looks at more than blocks."""
        return None

    def payload_bytes(
        self, shape: Shape, *, step: int = 0, dtype: torch.dtype = torch.float32
    ) -> int | None:
        """Bytes of the payload of one tensor at ``step``; None where the gradients decide."""
        return None

    def approximate(
        self, x: Tensor, *, scale: Tensor, step: int, factors: Sequence[Tensor] = ()
    ) -> Tensor | None:
        """``x`` as its payload decodes it, to sample the error; None: not known.

        ``x (B, block)`` holds blocks, or is a whole tensor if :attr:`block` is 0.

        Args:
            scale: of a GradScaler, 0-d.
            factors: that are kept for the tensor, if :attr:`keeps_factors`.
        """
        return None

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        """The codec of one parameter at synchronised step ``step`` (from 0).

        Policies choose here, and a codec that depends on the shape is fitted to it.
        """
        return self

    def phase(self, step: int) -> Hashable:
        """Changes when :meth:`for_tensor` may answer differently than at the step before."""
        return 0

    def boundaries(self) -> tuple[int, ...]:
        """The steps at which :meth:`phase` changes, and 0, ascending."""
        return (0,)

    def leaves(self) -> tuple[Codec, ...]:
        """Every codec that :meth:`for_tensor` may answer with, one for all that differ by shape."""
        return (self,)


@dataclass(frozen=True)
class BlockCodec(Codec):
    """A codec of blocks of elements; see the module's docstring for the shapes.

    ``stochastic`` codecs round at random. They take ``keys (..., B, 1)``, int32, one for every
    block, step, parameter and rank, and draw from them with :mod:`lightning_dist.codecs.noise`: the
    same keys are the same bytes on every device. With ``shared_keys`` all ranks have the same ones,
    and :meth:`decode` takes them too.
    """

    stochastic: ClassVar[bool] = False
    shared_keys: ClassVar[bool] = False
    fusable: ClassVar[bool] = True

    @property
    def elementwise(self) -> bool:
        return self.block == 1

    def of_parameters(self) -> BlockCodec | None:
        return None if self.exchange == "gather" or self.stochastic else self

    def of_shards(self) -> BlockCodec | None:
        return None if self.exchange == "gather" or self.shared_keys else self

    @property
    def native(self) -> Native | None:
        """The C++ passes of the codec; None: torch's compiler can make one loop of each."""
        return None

    @property
    def block(self) -> int:
        return 1

    def approximate(
        self, x: Tensor, *, scale: Tensor, step: int, factors: Sequence[Tensor] = ()
    ) -> Tensor | None:
        numbers = torch.arange(len(x), dtype=torch.int32, device=x.device).unsqueeze(-1)
        keys = block_keys(numbers, step) if self.stochastic else None
        return self.decode(self.encode(x, keys), x.dtype, keys)

    def smaller_blocks(self) -> Iterator[BlockCodec]:
        """The codec itself, and then the same with smaller and smaller blocks, where it can.

        One of them takes its place for a tensor that has few blocks for the number of ranks.
        """
        yield self

    @abstractmethod
    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        """Layout of the payload of gradients that DDP holds in ``dtype``."""

    @abstractmethod
    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        """``x (..., B, block)`` -> one tensor ``(..., B, per_block)`` for each plane.

        Pure and deterministic; ``x`` is not changed. A value that is not finite must make the
        decoded block not finite: a GradScaler depends on seeing it.
        """

    @abstractmethod
    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        """The payload of :meth:`encode` -> ``(..., B, block)`` in the compute dtype ``dtype``."""

    def add(
        self, total: Tensor, payload: Payload, *, weight: float, keys: Tensor | None = None
    ) -> Tensor:
        """``total + weight * decode(payload)``, which may be ``total`` itself, changed in place.

        Sparse codecs touch only what they sent.
        """
        part = self.decode(payload, total.dtype, keys)
        return total + (part * weight if weight != 1 else part)

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

    def payload_bytes(
        self, shape: Shape, *, step: int = 0, dtype: torch.dtype = torch.float32
    ) -> int | None:
        return self.wire_bytes(math.prod(shape), dtype)
