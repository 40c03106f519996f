"""Devices with Triton kernels, and who has which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import triton
import triton.language as tl

from lightning_dist.codecs.base import BlockCodec, Codec

_HEADROOM: tl.constexpr = tl.constexpr(1.008)
_SMALLEST_NORMAL: tl.constexpr = tl.constexpr(2.0**-126)
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
_TO_INTEGER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: the sum has no fraction


@triton.jit
def is_finite(x):
    """By the bits of float32."""
    return (x.to(tl.int32, bitcast=True) & _EXPONENT) != _EXPONENT


@triton.jit
def largest(x):
    """``max |x|`` of every block, ``(blocks, 1, 1)``; NaN where there is one.

    As integers, whose order is that of floats without a sign, with NaN above all: the maximum of
    GPUs leaves NaN out.
    """
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    highest = tl.max(tl.max(size, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return highest.to(tl.float32, bitcast=True)


@triton.jit
def total(x):
    """Sum of every block, ``(blocks, 1, 1)``."""
    return tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def cut_to_bfloat16(scale):
    """Rounded toward zero to a bfloat16 value, still float32."""
    return (scale.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def block_scale(amax, LEVELS: tl.constexpr):
    """The smallest scale for which ``amax / scale <= LEVELS``, within 0.8 %."""
    return cut_to_bfloat16(amax * (_HEADROOM / LEVELS))


@triton.jit
def in_steps(x, scale):
    """``x / scale`` by the rounded reciprocal, finite where the scale is 0; 0 in place of NaN.

    The eager definition turns NaN into integers, of which C says nothing: a code of such a block
    may be any, its scale is not finite.
    """
    step = tl.where(scale < _SMALLEST_NORMAL, _SMALLEST_NORMAL, scale)
    y = x * tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    return tl.where(y == y, y, 0.0)


@triton.jit
def nearest(y):
    """int32, half to even; ``|y| < 2**22``."""
    return ((y + _TO_INTEGER) - _TO_INTEGER).to(tl.int32)


@triton.jit
def mix(x):
    """uint32 -> uint32, the hash of ``codecs/noise.py``."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def block_keys(numbers, salt):
    """One key for every block number (uint32) under ``salt`` (uint32)."""
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    return mix(mix(numbers * golden + tl.full([], 1, tl.uint32)) ^ salt)


@triton.jit
def round_at_random(y, keys, place):
    """int32, one of the two integers around ``y``, ``|y| < 127.5``; ``place``: in its block."""
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    noise = mix(keys + place.to(tl.uint32) * golden) >> 8
    return ((y * 16777216.0).to(tl.int32) + noise.to(tl.int32)) >> 24


@dataclass(frozen=True)
class DeviceCodec:
    """A block codec of one bfloat16 scale per block and codes of 1, 2, 4 or 8 bits, for kernels.

    Or none, whose payload is the elements themselves: without device functions.

    Args:
        encode: ``(x, keys, place, OF) -> scale, codes``, a Triton function: ``x (blocks, parts,
            width)`` float32 to ``scale (blocks, 1, 1)`` float32, cut to bfloat16, and int32 codes
            whose lowest bits travel; ``keys (blocks, 1, 1)`` uint32 of stochastic codecs and
            ``place (1, parts, width)`` of an element in its block.
        level: ``(codes, OF) -> ...``, a Triton function: int32 codes as they travel, without a
            sign, to numbers that are multiplied by the scale.
        levels, option: constants of both, ``OF.levels`` and ``OF.option``.
    """

    codec: BlockCodec
    encode: Any = None
    level: Any = None
    levels: float = 0
    option: float = 0


_LARGEST_BLOCK = 8192  # elements; a program keeps whole blocks in its registers
Functions = tuple[Any, Any, Callable[[Any], float]]
"""Arguments ``encode``, ``level`` and ``option`` of :func:`register_kernels`."""
_registered: dict[type[Codec], Functions] = {}


def register_kernels(
    codec: type[BlockCodec],
    *,
    encode: Any,
    level: Any,
    option: Callable[[Any], float] = lambda codec: 0,
) -> None:
    """Give a class of codecs its device functions; subclasses do not inherit them.

    ``OF.levels`` is the attribute ``levels`` of the codec, or 0. For the other arguments see
    :class:`DeviceCodec`.

    Args:
        option: ``OF.option`` of a codec.
    """
    _registered[codec] = encode, level, option


def device_codec(codec: Codec, functions: Mapping[type[Codec], Functions]) -> DeviceCodec | None:
    """The device functions of ``codec``; None where it has none.

    Args:
        functions: of classes for which none are registered.
    """
    found = _registered.get(type(codec)) or functions.get(type(codec))
    # What is not fusable, such as a matrix product, adds in an order that a library chooses.
    if found is None or not codec.fusable or codec.block > _LARGEST_BLOCK:
        return None
    encode, level, option = found
    block_codec = cast(BlockCodec, codec)  # no others are registered
    return DeviceCodec(block_codec, encode, level, getattr(codec, "levels", 0), option(codec))
