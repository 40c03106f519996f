"""Arithmetic between gradient, memory and payload of a block codec.

Plain torch functions over a codec, run eagerly in cache-sized tiles; ``inductor.py`` turns each one
pass over memory with the same bytes.

Shapes: ``grad`` and every tensor of ``state`` ``(rows, B, block)``; payload planes ``(rows, B,
m)``; ``keys (rows, B, 1)`` int32 for stochastic codecs, else None; ``scale`` 0-d, the GradScaler's
scale (1 without one). State whose new value is not finite stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.codecs.base import BlockCodec, Payload
from lightning_dist.codecs.memory import Memory, State
from lightning_dist.codecs.threshold import Threshold

Pass: TypeAlias = Callable[..., Any]

_CACHE_ELEMENTS = 1 << 16  # 256 KB of float32 and its temporaries stay in a core's cache
_FUSED_FROM_BLOCKS = 16


@dataclass(frozen=True)
class Factors:
    """Factors for the division by the world size, which differ by exchange."""

    encode: float = 1.0  # gradient -> what is encoded
    own: float = 1.0  # own decoded payload -> what it stands for
    mean: float = 1.0  # weight of each received payload in the mean
    divisor: float = 1.0  # of their weighted sum


@dataclass(frozen=True)
class Passes:
    """The arithmetic itself. ``own`` and ``mean`` are written, ``grad`` and ``state`` changed."""

    codec: BlockCodec
    memory: Memory
    factors: Factors
    world_size: int

    def encode(
        self, grad: Tensor, state: State, scale: Tensor, keys: Tensor | None, own: Payload
    ) -> None:
        """``own <- C(compensated)``, with error feedback ``C(grad + scale * residual)``."""
        x = self.memory.compensated(_widened(grad), state, scale)
        _write(own, self._encoded(x, keys))

    def encode_and_commit(
        self, grad: Tensor, state: State, scale: Tensor, keys: Tensor | None, own: Payload
    ) -> None:
        """As :meth:`encode`, and in the same pass ``state <- what D(own) did not say``."""
        x = _widened(grad)
        compensated = self.memory.compensated(x, state, scale)
        payload = self._encoded(compensated, keys)
        _write(own, payload)
        if state:
            self._commit(x, compensated, self.decoded(payload, x.dtype, keys), state, scale)

    def reduce(self, shards: Payload, keys: Tensor | None, mean: Payload) -> None:
        """``mean <- C(sum_r D(shards[r]) / W)``, added in rank order."""
        # Payloads in float64 are uncompressed gradients, whose mean must not be shorter than they.
        wide = shards[0].dtype == torch.float64
        exact = self._mean_of_ranks(shards, torch.float64 if wide else torch.float32)
        _write(mean, self.codec.encode(exact, keys))

    def decode_and_commit(
        self,
        grad: Tensor,
        state: State,
        scale: Tensor,
        keys: Tensor | None,
        own: Payload,
        payloads: Sequence[Payload],
    ) -> None:
        """``state <- what D(own) did not say``, and ``grad <- mean of D(payloads)``.

        With an empty ``state`` ``own`` is not read: what is written when encoding is not again.
        """
        x = _widened(grad)
        if state:
            compensated = self.memory.compensated(x, state, scale)
            self._commit(x, compensated, self.decoded(own, x.dtype, keys), state, scale)
        mean = self._weighted_sum(payloads, x.dtype, weight=self.factors.mean, keys=keys)
        divisor = self.factors.divisor
        grad.copy_(mean / divisor if divisor != 1 else mean)

    def decoded(self, own: Payload, dtype: torch.dtype, keys: Tensor | None) -> Tensor:
        """Decoded payload of this rank."""
        sent = self.codec.decode(own, dtype, keys)
        return sent * self.factors.own if self.factors.own != 1 else sent

    def server_feedback(
        self, residual: Tensor, scale: Tensor, shards: Payload, mean: Payload
    ) -> None:
        """Add what the second rounding lost to the owner's residual ``(1, B, block)``.

        The owner of a shard alone knows the exact sum. ``W`` times the error of the mean in one
        rank's residual is the error itself in the mean residual, so mass is conserved without a
        second state.
        """
        exact = self._mean_of_ranks(shards, residual.dtype)
        kept_back = (exact - self.codec.decode(mean, residual.dtype)) * self.world_size
        new = residual + kept_back / scale
        residual.copy_(torch.where(new.isfinite(), new, residual))

    def _encoded(self, compensated: Tensor, keys: Tensor | None) -> Payload:
        factor = self.factors.encode
        return self.codec.encode(compensated * factor if factor != 1 else compensated, keys)

    def _commit(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> None:
        after = self.memory.after(x, compensated, sent, state, scale)
        finite = after[0].isfinite()  # all that is kept of an element comes from the same three
        for held, new in zip(state, after, strict=True):
            held.copy_(torch.where(finite, new, held))

    def _mean_of_ranks(self, shards: Payload, dtype: torch.dtype) -> Tensor:
        rows = [tuple(plane[r : r + 1] for plane in shards) for r in range(self.world_size)]
        return self._weighted_sum(rows, dtype, weight=1.0 / self.world_size)

    def _weighted_sum(
        self,
        payloads: Sequence[Payload],
        dtype: torch.dtype,
        *,
        weight: float,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Sum in the order given. Each is weighted before it is added: a mean does not overflow."""
        first, *others = payloads
        total = self.codec.decode(first, dtype, keys)
        total = total * weight if weight != 1 else total
        for payload in others:
            total = self.codec.add(total, payload, weight=weight, keys=keys)
        return total


class Kernels:
    """The passes of one codec for gradients of one dtype, by their names in :class:`Passes`.

    Compiled ones where there are some, else the eager ones in tiles that stay in a cache.
    """

    def __init__(
        self, codec: BlockCodec, *, memory: Memory, factors: Factors, world_size: int
    ) -> None:
        self.codec, self.memory = codec, memory
        self.passes = Passes(codec, memory, factors, world_size)
        self._fused: Mapping[str, Pass] = {}
        # With fewer blocks, what torch's compiler has made costs more to call than to run.
        self._fused_from = 1 if codec.native else _FUSED_FROM_BLOCKS
        self.encode, self.encode_and_commit, self.reduce, self.decode_and_commit = (
            partial(self._call, name)
            for name in ("encode", "encode_and_commit", "reduce", "decode_and_commit")
        )
        self.server_feedback = partial(self._call, "server_feedback")

    def use(self, fused: Mapping[str, Pass]) -> None:
        """Replace passes by fused ones."""
        self._fused = fused

    @property
    def is_fused(self) -> bool:
        """Whether any pass was replaced."""
        return bool(self._fused)

    def _call(self, name: str, *tensors: Any) -> None:
        first = tensors[0] if isinstance(tensors[0], Tensor) else tensors[0][0]
        rows, blocks, _ = first.shape
        if name in self._fused and blocks >= self._fused_from:
            self._fused[name](*tensors)
            return
        eager = getattr(self.passes, name)
        # A GPU wants one launch, a CPU tiles that stay in its cache.
        in_cache = max(1, _CACHE_ELEMENTS // (rows * self.codec.block))
        if blocks <= in_cache or is_accelerator(first.device):
            eager(*tensors)
            return
        for start in range(0, blocks, in_cache):
            eager(*_cut(tensors, slice(start, start + in_cache)))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Arithmetic and residuals are in float32, or in float64 for float64 gradients."""
    return torch.promote_types(dtype, torch.float32)


def _widened(grad: Tensor) -> Tensor:
    return grad.to(compute_dtype(grad.dtype))


def _write(out: Payload, values: Payload) -> None:
    for plane, value in zip(out, values, strict=True):
        plane.copy_(value)


def _cut(tree: Any, blocks: slice) -> Any:
    if isinstance(tree, Tensor):
        return tree[:, blocks] if tree.dim() == 3 else tree
    return None if tree is None else tuple(_cut(part, blocks) for part in tree)


MOST_PLACES = 1 << 31
"""Elements of a bucket whose places fit int32."""


def select(
    codec: Threshold, compensated: Tensor, residual: Tensor | None, scale: Tensor, offset: int
) -> Payload:
    """Add the residual in place; places in the bucket, int32, and values of what is large then."""
    if residual is not None:
        # Not addcmul_, which rounds once only where the machine can.
        compensated.add_(residual * scale)
    where, values = codec.select(compensated, scale)
    return (where + offset).to(torch.int32), values


def keep(compensated: Tensor, residual: Tensor | None, scale: Tensor) -> None:
    """The rest of ``compensated`` becomes the residual where it is finite, and it zero."""
    if residual is not None:
        left = compensated / scale
        residual.copy_(torch.where(left.isfinite(), left, residual))
    compensated.zero_()


def scatter(compensated: Tensor, payload: Payload, weight: float) -> None:
    """Add ``weight`` times the values of ``payload`` at their places, which are distinct."""
    places, values = payload
    compensated.index_add_(0, places, values.to(compensated.dtype), alpha=weight)


EAGER: Mapping[str, Pass] = {function.__name__: function for function in (select, keep, scatter)}
"""The passes by name."""
