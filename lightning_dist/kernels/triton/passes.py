"""Triton kernels of the codecs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dist.codecs import FP8, QSGD, Int4, Int8, NoCompression, Sign, TernGrad, Uncompressed
from lightning_dist.codecs.base import Codec
from lightning_dist.kernels.triton.device import (
    block_scale,
    cut_to_bfloat16,
    decode_kernel,
    encode_kernel,
    in_steps,
    largest,
    nearest,
    reduce_kernel,
    round_at_random,
    total,
)
from lightning_dist.kernels.triton.registry import DeviceCodec, Functions
from lightning_dist.kernels.triton.table import GRADIENT_DTYPES, SliceTable, TileShape

_RAW = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
_ELEMENTS_PER_WARP = 512  # 16 for each thread: Triton 3.9 spills nothing where data are aligned


@dataclass(frozen=True)
class TableKernels:
    """Passes of one codec over the slices of a :class:`SliceTable`.

    They write the bytes that the eager definition writes (``codecs/``, ``kernels/passes.py``),
    except in the codes of blocks that are not finite, of which it says nothing, and in the bits of
    NaN. Nothing waits for the device; launches go to its current stream. On a CPU they need
    ``TRITON_INTERPRET=1`` before Triton is first imported.

    ``flat`` holds gradients in float32, bfloat16 or float16, ``residual`` float32; both are flat,
    and the table has the places in them. ``scale`` is the GradScaler's, 0-d float32 on the device.
    ``salts`` are for stochastic codecs: int32 on the device, one for each slice; the keys of blocks
    are ``block_keys(number of the block in its slice, salt)``.
    """

    device_codec: DeviceCodec
    dtype: torch.dtype  # of gradients
    only_compile: bool = False

    def compiling(self) -> TableKernels:
        """Passes that are compiled for their arguments and not run.

        Called at set-up with the tensors of a step: no kernel is then compiled in the backward
        pass. Kernels are specialised by the codec, the dtype of gradients, the number of payloads,
        which arguments are None, ``TileShape.alignment``, and addresses that 16 divides or not;
        not by the number of slices or tiles.
        """
        return replace(self, only_compile=True)

    def encode(
        self,
        flat: Tensor,
        residual: Tensor | None,
        scale: Tensor,
        *,
        table: SliceTable,
        payload: Tensor | None,
        finite: Tensor | None = None,
        salts: Tensor | None = None,
        writes_state: bool = True,
    ) -> None:
        """``payload <- C(p)`` and ``residual <- (p - D(payload)) / scale``.

        ``p`` is the compensated gradient, ``flat + scale * residual``. A block that is not finite
        keeps its residual, and so does an element whose new one is not.

        Args:
            payload: uint8, ``table.payload_bytes`` of any shape, contiguous. None: only the
                residual is wanted, which an encoding of the same ``flat``, not yet overwritten by
                :meth:`decode`, and ``salts`` has left as it was.
            finite: bool, one element; set to False if any block is not finite, never to True.
            writes_state: False leaves the residual as it is.
        """
        assert payload is None or payload.numel() == table.payload_bytes, "another table's payload"
        _check(torch.float32, residual, scale)
        _check(torch.bool, finite)
        _check(torch.uint8, payload)
        _launch(
            encode_kernel,
            table.tiles,
            _gradient(flat),
            residual,
            scale,
            payload,
            None if finite is None else finite.view(torch.uint8),
            self._salts(salts),
            WRITES_RESIDUAL=writes_state and residual is not None,
            BF16=flat.dtype == torch.bfloat16,
            **self._constants(table, encodes=True),
        )

    def reduce(
        self,
        shards: Tensor,
        mean: Tensor | None,
        *,
        table: SliceTable,
        row: int,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        salts: Tensor | None = None,
    ) -> None:
        """``mean <- C(m)``, ``m`` the mean of the decoded ``shards``, added in their order.

        With ``residual`` also ``residual += W (m - D(mean)) / scale`` in the places of ``row``,
        where the mean's block is finite: what the second rounding loses, see
        :meth:`lightning_dist.kernels.passes.Kernels.server_feedback`.

        Args:
            shards: uint8 ``(W, table.row_bytes(row))``: the row that this rank owns, as every rank
                encoded it.
            mean: uint8, one such row. None: only the residual is wanted.
            salts: of the mean, which is rounded anew.
        """
        table = table.finer or table
        size = table.row_bytes(row)
        assert mean is None or mean.numel() == size, "a mean of another row"
        _check(torch.float32, residual, scale)
        _check(torch.uint8, shards, mean)
        _launch(
            reduce_kernel,
            table.tiles[table.tile_starts[row] : table.tile_starts[row + 1]],
            shards,
            size // 8,
            mean,
            residual,
            scale,
            self._salts(salts),
            COUNT=_count(shards, size),
            **self._constants(table, encodes=True),
        )

    def decode(
        self, payloads: Tensor, flat: Tensor, *, table: SliceTable, weight: float = 1.0
    ) -> None:
        """``flat <- sum of weight * D(payload)`` over ``payloads``, in their order.

        Args:
            payloads: uint8 ``(count, table.payload_bytes)``, or any shape of one payload.
        """
        size = table.payload_bytes
        _check(torch.uint8, payloads)
        _launch(
            decode_kernel,
            table.tiles,
            payloads,
            size // 8,
            _gradient(flat),
            COUNT=_count(payloads, size),
            WEIGHT=weight,
            BF16=flat.dtype == torch.bfloat16,
            **self._constants(table, encodes=False),
        )

    def _constants(self, table: SliceTable, *, encodes: bool) -> dict[str, Any]:
        codec = self.device_codec
        return {
            "only_compile": self.only_compile,
            **({"ENCODE": codec.encode} if encodes else {}),
            "LEVEL": codec.level,
            "OF": replace(
                table.shape,
                levels=codec.levels,
                option=codec.option,
                raw=_RAW[self.dtype] if codec.encode is None else None,
                raw_is_bfloat16=self.dtype == torch.bfloat16,
            ),
        }

    def _salts(self, salts: Tensor | None) -> Tensor | None:
        stochastic = self.device_codec.codec.stochastic
        assert (salts is not None) == stochastic, "salts are for stochastic codecs, and those only"
        _check(torch.int32, salts)
        return salts


def warps_of(shape: TileShape) -> int:
    """Warps that work on one tile."""
    return min(16, max(4, shape.blocks * shape.parts * shape.width // _ELEMENTS_PER_WARP))


def _launch(
    kernel: Any,
    tiles: Tensor,
    *tensors: Any,
    only_compile: bool,
    **constants: Any,
) -> None:
    """``kernel`` on every tile; all launches of the package are here.

    Bytes must not depend on a compiler's choice, so ``a * b + c`` is not contracted. Triton never
    flushes subnormal numbers of these operations, and rounds ``div_rn``.
    """
    grid = (len(tiles),)
    if not grid[0]:
        return
    warps = warps_of(constants["OF"])
    launch = partial(kernel.warmup, grid=grid) if only_compile else kernel[grid]
    launch(tiles, *tensors, **constants, num_warps=warps, enable_fp_fusion=False)


def _gradient(flat: Tensor) -> Tensor:
    """bfloat16 as its bits: kernels round in integers."""
    assert flat.is_contiguous()
    assert flat.dtype in GRADIENT_DTYPES
    return flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat


def _count(payloads: Tensor, size: int) -> int:
    """Count of payloads of ``size`` bytes."""
    if not size:
        return 1
    assert payloads.numel() % size == 0, "payloads of another table"
    return payloads.numel() // size


def _check(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or (tensor.dtype == dtype and tensor.is_contiguous())


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
    """Numbers of codes from 0 to ``2 levels``."""
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
