"""Interface of codecs: pure functions between gradients and payloads.

A codec works on tensors and uses neither process groups nor clocks, so it runs in a notebook, and
the same laws are tested for all codecs (``tests/codecs``).

Most codecs are a :class:`BlockCodec`. Gradients arrive as ``x (..., B, k)``: ``B`` blocks of
``k = codec.block`` elements, in the compute dtype (float32, or float64 for float64 models). The
payload is a tuple of *planes*, each ``(..., B, m)`` with ``m`` elements per block; the planes of
one payload lie one after the other in one uint8 buffer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.codecs.memory import ErrorFeedback, Memory, NoMemory
from lightning_dist.codecs.noise import block_keys

Payload: TypeAlias = tuple[Tensor, ...]
Shape: TypeAlias = tuple[int, ...]


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
    """Passes of a codec in ``kernels/native.cpp``, and their arguments."""

    functions: str  # prefix of their names
    planes: tuple[str, ...]  # of the payload, by their names in C++
    values: torch.dtype
    k: int  # elements of every block that are sent
    gain: float = 1.0  # factor of decoded values


@dataclass(frozen=True)
class Codec(ABC):
    """Base class of codecs. Subclasses are frozen dataclasses of their hyperparameters.

    Class attributes that a subclass sets:

    ``name``
        as in ``codec="..."``.
    ``use``
        when to use it: a line of ``lightning-dist codecs``.
    ``exchange``
        ``"allreduce"`` when payloads may be added by the network (the codec is linear),
        ``"two_shot"`` when they must be decoded before they are added, ``"gather"`` when every
        rank receives every payload (sparse codecs); see :mod:`lightning_dist.base.exchanges`.
    ``lossless``
        ``decode(encode(x)) == x``: no residual is kept.
    ``min_numel``
        tensors with fewer elements, and 1-D ones, are sent uncompressed unless the user sets
        another limit; 0 compresses everything.
    ``keeps_residual``
        ``error_feedback="auto"`` keeps a residual.
    ``bit_exact``
        all machines decode the same bytes to the same bits.
    ``contraction``
        ``|decode(encode(x)) - x| < |x|`` on average; otherwise error feedback diverges.
    ``fusable``
        the encode and decode passes may be compiled.
    ``whole_tensors``
        tensors are not divided among the ranks of a node, because the codec depends on their shape:
        each is sent by one of these ranks.
    ``keeps_factors``
        the communication unit keeps two factors of each tensor between steps, equal on all ranks,
        as that of ``powersgd``.
    """

    name: ClassVar[str]
    use: ClassVar[str] = ""
    exchange: ClassVar[str]
    lossless: ClassVar[bool] = False
    min_numel: ClassVar[int] = 0
    keeps_residual: ClassVar[bool] = False
    bit_exact: ClassVar[bool] = True
    fusable: ClassVar[bool] = False
    whole_tensors: ClassVar[bool] = False
    keeps_factors: ClassVar[bool] = False

    @property
    def contraction(self) -> bool:
        return True

    @property
    def seldom(self) -> bool:
        """True if error feedback applies the residual of so many steps at once that it may diverge.

        For a warning, where steps are outer ones of rate 1.
        """
        return False

    @property
    def momentum_correction(self) -> float:
        """Coefficient of the momentum applied to local gradients before compression; 0: none."""
        return 0.0

    @property
    def local_clip(self) -> float:
        """Norm to which a tensor's gradient is clipped, ``1/sqrt(W)`` of it on a rank; 0: none."""
        return 0.0

    @property
    def accepts(self) -> tuple[str, str] | None:
        """Tensors that are compressed, and a way to more of them, for messages; None: all."""
        return None

    @property
    def elementwise(self) -> bool:
        """True if elements are encoded independently, so that tensors may be joined."""
        return False

    @property
    def block(self) -> int:
        """Elements that are encoded together and stay on one rank; 0: the whole tensor."""
        return 0

    def __str__(self) -> str:
        """As in ``codec="..."``: the name, and the options that differ from the defaults."""
        given = (
            f"{option.name}={_text(getattr(self, option.name))}"
            for option in fields(self)
            if getattr(self, option.name) != option.default
        )
        options = ",".join(given)
        return f"{self.name}:{options}" if options else self.name

    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        """State kept between steps; ``"auto"`` is error feedback if :attr:`keeps_residual`."""
        keeps = self.keeps_residual if error_feedback == "auto" else error_feedback
        return ErrorFeedback() if keeps and not self.lossless else NoMemory()

    def inside_node(self) -> BlockCodec | None:
        """Codec for the exchange inside a node, where gradients may be cast; None: unsuited."""
        return None

    def of_parameters(self) -> BlockCodec | None:
        """Codec for parameters that are gathered (FSDP2); None: unsuited."""
        return None

    def of_shards(self) -> BlockCodec | None:
        """Codec for gradients that are reduced to shards (FSDP2); None: unsuited."""
        return None

    def payload_bytes(
        self, shape: Shape, *, step: int = 0, dtype: torch.dtype = torch.float32
    ) -> int | None:
        """Bytes of the payload of one tensor at ``step``; None: they depend on the gradients."""
        return None

    def approximate(
        self, x: Tensor, *, scale: Tensor, step: int, factors: Sequence[Tensor] = ()
    ) -> Tensor | None:
        """Decoded payload of ``x``, to sample the error; None: not available.

        Args:
            x: blocks ``(B, block)``, or a whole tensor if :attr:`block` is 0.
            scale: of a GradScaler, 0-d.
            factors: of the tensor, if :attr:`keeps_factors`.
        """
        return None

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        """Codec of one parameter at synchronised step ``step`` (from 0).

        Policies choose another codec here, and codecs that depend on the shape adapt to it.
        """
        return self

    def phase(self, step: int) -> Hashable:
        """Key that changes where :meth:`for_tensor` may return another codec than a step before."""
        return 0

    def boundaries(self) -> tuple[int, ...]:
        """Steps at which :meth:`phase` changes, from 0, ascending."""
        return (0,)

    def leaves(self) -> tuple[Codec, ...]:
        """Codecs that :meth:`for_tensor` may return; one for all that differ by the shape only."""
        return (self,)


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Codec of blocks of elements.

    Gradients are ``x (..., B, block)``, payloads one tensor ``(..., B, per_block)`` for each plane.

    ``stochastic`` codecs round at random: :mod:`lightning_dist.codecs.noise` makes random numbers
    of ``keys (..., B, 1)``, int32, one for each block, step, parameter and rank. The same keys give
    the same bytes on every device. With ``shared_keys`` they are equal on all ranks, and
    :meth:`decode` gets them too.
    """

    stochastic: ClassVar[bool] = False
    shared_keys: ClassVar[bool] = False
    fusable: ClassVar[bool] = True

    @property
    def elementwise(self) -> bool:
        return self.block == 1

    def of_parameters(self) -> BlockCodec | None:
        return None if EXCHANGES[self.exchange].sparse or self.stochastic else self

    def of_shards(self) -> BlockCodec | None:
        return None if EXCHANGES[self.exchange].sparse or self.shared_keys else self

    @property
    def native(self) -> Native | None:
        """C++ passes of the codec; None: torch's compiler is used."""
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
        """The codec itself, followed by variants with ever smaller blocks, if there are any.

        One of these is used for a tensor that has too few blocks for the number of ranks.
        """
        yield self

    @abstractmethod
    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        """Layout of the payload of gradients that DDP holds in ``dtype``."""

    @abstractmethod
    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        """Payload of ``x (..., B, block)``: one tensor ``(..., B, per_block)`` for each plane.

        Pure and deterministic; ``x`` is not changed. A value that is not finite must make the
        decoded block not finite, as a GradScaler looks for it there.
        """

    @abstractmethod
    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        """Gradient ``(..., B, block)`` of a payload, in the compute dtype ``dtype``."""

    def add(
        self, total: Tensor, payload: Payload, *, weight: float, keys: Tensor | None = None
    ) -> Tensor:
        """``total + weight * decode(payload)``, a new tensor or ``total`` changed in place.

        Sparse codecs read and write only the elements that were sent.
        """
        part = self.decode(payload, total.dtype, keys)
        return total + (part * weight if weight != 1 else part)

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """Upper bound of ``|decode(encode(x)) - x|``, broadcastable to ``x``."""

    def finite(self, payload: Payload) -> Tensor:
        """0-d bool: True if all values that were encoded are finite."""
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


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
