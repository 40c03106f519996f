"""Scales of blocks, and the precision of what is computed with them.

A code of up to 15 bits times a bfloat16 scale is exact in float32: eager, compiled, CPU and GPU
kernels, fused multiply-add or not, decode the same bytes to the same floats.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_REDUCED = ("tf32", "bf16")
_turn = threading.RLock()  # the setting is the process's, and reducers have threads of their own


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32. The setting of the training is restored.

    The sum of what was sent and what is kept is the gradient only if both are of the same product:
    with TF32 the difference is 1e-3. While the setting is changed the process has no other: what
    other threads multiply meanwhile is exact too.
    """
    with _turn:
        if not hasattr(torch.backends.mkldnn, "matmul"):  # torch 2.7, which has one setting
            common = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(common)
            return
        matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        before = [(matmul, matmul.fp32_precision) for matmul in matmuls]
        if any(precision in _REDUCED for _, precision in before):
            try:
                # As it was chosen: torch raises where its two ways to set it contradict.
                common = torch.get_float32_matmul_precision()
            except RuntimeError:
                common = "highest"
            try:
                if common != "highest":
                    torch.set_float32_matmul_precision("highest")
                else:
                    for matmul, _ in before:
                        matmul.fp32_precision = "ieee"
                yield
            finally:
                if common != "highest":
                    torch.set_float32_matmul_precision(common)
                for matmul, precision in before:
                    matmul.fp32_precision = "none"
                    if matmul.fp32_precision != precision:  # it was not inherited
                        matmul.fp32_precision = precision
            return
    yield


HEADROOM = 1.008
"""A scale is cut to bfloat16 (toward zero, at most one part in 128 less), so it starts 0.8 % larger
and is afterwards still at least what it has to be: no code leaves its range."""

SMALLEST_NORMAL = 2.0**-126


def cut_to_bfloat16(scale: Tensor) -> Tensor:
    """``scale`` (float32) rounded toward zero to a bfloat16 value, still float32.

    On the bits: compilers drop a cast to bfloat16 and back.
    """
    return (scale.view(torch.int32) & -65536).view(torch.float32)


def block_scale(amax: Tensor, *, levels: float) -> Tensor:
    """The smallest scale for which ``amax / scale <= levels``, within 0.8 %."""
    return cut_to_bfloat16(amax.to(torch.float32) * (HEADROOM / levels))


def representable(norm: Tensor) -> Tensor:
    """``norm``, and infinity where float32, and so a scale, cannot hold it."""
    return torch.where(norm <= torch.finfo(torch.float32).max, norm, torch.inf)


def per_step(scale: Tensor) -> Tensor:
    """``1 / scale``, finite where the scale is 0: a block of zeros has codes 0."""
    return 1.0 / scale.clamp_min(SMALLEST_NORMAL)


def pack(codes: Tensor, *, bits: int) -> Tensor:
    """``codes (..., k)`` in ``[0, 2**bits)`` -> uint8 ``(..., k * bits / 8)``; bits 1, 2 or 4.

    The i-th part of the block fills the i-th bits of all bytes: whole vectors are added, no element
    is moved. In floats, because compilers make vectors of those and not of small integers.
    """
    parts = codes.to(torch.float32).chunk(8 // bits, dim=-1)
    packed: Tensor = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        packed = packed + part * float(1 << (bits * place))
    return packed.to(torch.uint8)


def unpack(packed: Tensor, *, bits: int) -> Tensor:
    """The inverse of :func:`pack`: uint8 ``(..., k)``."""
    whole = packed.to(torch.int32)
    mask = (1 << bits) - 1
    return torch.stack([(whole >> shift) & mask for shift in range(0, 8, bits)], dim=-2).flatten(-2)
