"""Counter-based random numbers.

A 32-bit hash of (key of the block, position in it), in integer arithmetic: the same on every
device, eager or compiled, in one tile or many, and after a resume. The hash is "lowbias32" by
Chris Wellons (https://nullprogram.com/blog/2018/07/31/).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -1640531527  # 2**32 / golden ratio, as int32
_FIRST, _SECOND = 2146121005, -2073254261  # 0x7feb352d, 0x846ca68b


def mix(x: Tensor) -> Tensor:
    """int32 -> int32, a bijection that looks random."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


def block_keys(blocks: Tensor, salt: int) -> Tensor:
    """One key for every block number in ``blocks`` (int32) under ``salt`` (any 32 bits)."""
    return mix(mix(blocks * _GOLDEN + 1) ^ ((salt & 0xFFFFFFFF) - ((salt & 0x80000000) << 1)))


def bits(keys: Tensor, count: int) -> Tensor:
    """``keys (..., B, 1)`` -> int32 ``(..., B, count)``, uniform over all 32-bit numbers."""
    places = torch.arange(count, dtype=torch.int32, device=keys.device)
    return mix(keys + places * _GOLDEN)


def uniform24(keys: Tensor, count: int) -> Tensor:
    """``keys (..., B, 1)`` -> int32 ``(..., B, count)``, uniform in [0, 2**24): in fixed point."""
    return (bits(keys, count) >> 8) & 0xFFFFFF
