"""Device functions shared by all codecs: ``codecs/scales.py`` and ``noise.py`` in Triton.

Tiles are ``(blocks, parts, width)``: element ``part * width + j`` of a block has its code in the
bits of ``part`` of byte ``j``, see :func:`lightning_dist.codecs.scales.pack`. What is beyond a
block or a tensor is 0.

The definition is the eager one, to the bit, so the arithmetic is written such that no compiler has
a choice: divisions are rounded (``div_rn``; ``/`` is approximate in float32), NaN and rounding to
integers go by bits and by exact additions, and bfloat16 by integers. Kernels are launched with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
