"""Two device functions of every codec; what they must be is in ``DeviceCodec``.

The definitions are those in ``lightning_dist/codecs``, where they are explained.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_dist.codecs import FP8, QSGD, Int4, Int8, NoCompression, Sign, TernGrad, Uncompressed
from lightning_dist.codecs.base import Codec
from lightning_dist.kernels.triton.device import (
    block_scale,
    cut_to_bfloat16,
    in_steps,
    largest,
    nearest,
    round_at_random,
    total,
)
from lightning_dist.kernels.triton.registry import Functions

_FROM_E4M3: tl.constexpr = tl.constexpr(2.0**120)


@triton.jit
def int8_encode(x, keys, place, OF: tl.constexpr):
    scale = block_scale(largest(x), OF.levels)
    return scale, nearest(in_steps(x, scale))


@triton.jit
def int8_level(codes, OF: tl.constexpr):
    return (codes << 24) >> 24  # of two's complement in a byte


@triton.jit
def int4_encode(x, keys, place, OF: tl.constexpr):
    scale = block_scale(largest(x), OF.levels)
    return scale, nearest(in_steps(x, scale)) + OF.levels


@triton.jit
def offset_level(codes, OF: tl.constexpr):
    """Of codes from 0 to ``2 levels``."""
    return codes - OF.levels


@triton.jit
def fp8_encode(x, keys, place, OF: tl.constexpr):
    scale = block_scale(largest(x), OF.levels)
    return scale, _to_e4m3(in_steps(x, scale))


@triton.jit
def _to_e4m3(y):
    """Half to even, ``|y| <= 448``. In integers: not every device has the format."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Subnormal codes are multiples of 2**-9, as is the last bit of what is beside 2**14.
    small = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = small.to(tl.int32, bitcast=True) - 0x46800000
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    code = tl.where(size < (121 << 23), subnormal, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def fp8_level(codes, OF: tl.constexpr):
    """Exact: a multiplication by ``2**120`` moves the exponent, also of subnormal numbers."""
    size = ((codes & 0x7F) << 20).to(tl.float32, bitcast=True) * _FROM_E4M3
    size = tl.where((codes & 0x7F) == 0x7F, float("nan"), size)
    signed = size.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)  # 0 has a sign too
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def sign_encode(x, keys, place, OF: tl.constexpr):
    size = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    mean = total(size.to(tl.float64)) / OF.block
    return cut_to_bfloat16(mean.to(tl.float32)), (x >= 0).to(tl.int32)


@triton.jit
def sign_level(codes, OF: tl.constexpr):
    return codes * 2 - 1


@triton.jit
def qsgd_encode(x, keys, place, OF: tl.constexpr):
    """``OF.option``: whether the norm is that of l2."""
    norm = largest(x)
    if OF.option != 0:
        wide = x.to(tl.float64)
        norm = tl.sqrt(total(wide * wide)).to(tl.float32)
    scale = block_scale(norm, OF.levels)
    return scale, round_at_random(in_steps(x, scale), keys, place) + OF.levels


@triton.jit
def terngrad_encode(x, keys, place, OF: tl.constexpr):
    """``OF.option``: the limit in units of the root mean square; 0 for none."""
    limit = largest(x)
    if OF.option != 0:
        wide = x.to(tl.float64)
        clip = tl.sqrt(total(wide * wide) / OF.block) * OF.option
        # As a comparison: NaN must stay, and an infinity must not win over it.
        limit = tl.where(clip < limit.to(tl.float64), clip, limit.to(tl.float64)).to(tl.float32)
    scale = block_scale(limit, OF.levels)
    y = in_steps(x, scale)
    y = tl.where(y < -1.0, -1.0, tl.where(y > 1.0, 1.0, y))
    return scale, round_at_random(y, keys, place) + 1


def _no_option(codec: Codec) -> float:
    return 0


FUNCTIONS: dict[type[Codec], Functions] = {
    NoCompression: (None, None, _no_option),
    Uncompressed: (None, None, _no_option),
    Int8: (int8_encode, int8_level, _no_option),
    Int4: (int4_encode, offset_level, _no_option),
    FP8: (fp8_encode, fp8_level, _no_option),
    Sign: (sign_encode, sign_level, _no_option),
    QSGD: (qsgd_encode, offset_level, lambda codec: codec.norm == "l2"),
    TernGrad: (terngrad_encode, offset_level, lambda codec: codec.clip_sigma),
}
