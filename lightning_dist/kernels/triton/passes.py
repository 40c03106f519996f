"""The passes of a bucket: encode, reduce and decode, each one kernel launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lightning_dist.kernels.triton import skeletons
from lightning_dist.kernels.triton.registry import DeviceCodec
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
        """The same passes, compiled for their arguments and not run.

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
        commit: bool = True,
    ) -> None:
        """``payload <- C(p)`` and ``residual <- (p - D(payload)) / scale``.

        ``p`` is the compensated gradient, ``flat + scale * residual``. A block that is not finite
        keeps its residual, and so does an element whose new one is not.

        Args:
            payload: uint8, ``table.payload_bytes`` of any shape, contiguous. None: only the
                residual is wanted, which an encoding of the same ``flat``, not yet overwritten by
                :meth:`decode`, and ``salts`` has left as it was.
            finite: bool, one element; set to False if any block is not finite, never to True.
            commit: False leaves the residual as it is.
        """
        assert payload is None or payload.numel() == table.payload_bytes, "another table's payload"
        _check(torch.float32, residual, scale)
        _check(torch.bool, finite)
        _check(torch.uint8, payload)
        _launch(
            skeletons.encode_kernel,
            table.tiles,
            _gradient(flat),
            residual,
            scale,
            payload,
            None if finite is None else finite.view(torch.uint8),
            self._salts(salts),
            WRITES_RESIDUAL=commit and residual is not None,
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
            skeletons.reduce_kernel,
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
            skeletons.decode_kernel,
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
