"""Bytes of a parameter under a codec, and what keeps them below those of an uncompressed one.

A two-shot exchange gives every rank equally many blocks, so a parameter that has few of them is
mostly padding: 16 blocks of 256 elements on 256 ranks would be sent as 256 blocks. Such a
parameter gets smaller blocks, and where that does not help either it travels uncompressed. Both
depend on the parameter and the ranks alone, never on the bucket. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import torch

from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.exchange.wire import row_bytes
from lightning_dist.reducer.units.tiles import Grid

_PADDING = 1.25  # more bytes than without padding are reason enough for smaller blocks


def rows_of(codec: BlockCodec, ranks: int) -> int:
    """One row per rank where each rank reduces a shard, otherwise whole payloads travel."""
    return ranks if codec.exchange == "two_shot" and ranks > 2 else 1


def fitted(codec: BlockCodec, numel: int, *, ranks: int, dtype: torch.dtype) -> BlockCodec:
    """``codec`` with the largest block that pads ``numel`` elements by no more than a quarter.

    The block that sends least where every block pads more; other codecs as they are.
    """
    candidates = list(codec.smaller_blocks())
    if len(candidates) == 1:
        return codec
    rows = rows_of(codec, ranks)
    unpadded = sum(plane.bytes_per_block for plane in codec.planes(dtype)) * numel / codec.block
    sizes = {}
    for candidate in candidates:
        sizes[candidate] = rows * _row_bytes(candidate, numel, rows=rows, dtype=dtype)
        if sizes[candidate] <= _PADDING * unpadded:
            return candidate
    return min(sizes, key=sizes.__getitem__)


@singledispatch
def sends_more(
    codec: Codec, shares: Sequence[int], *, ranks: int, dtype: torch.dtype, itemsize: int
) -> bool:
    """Whether ``shares`` of a parameter, each in an exchange of ``ranks``, send more than DDP.

    Each is counted as if it were alone in its exchange, where padding weighs most.

    Args:
        dtype: in which the codec gets the gradients.
        itemsize: bytes of an element where it is not compressed.
    """
    return False  # a codec with units of its own chooses in `for_tensor` what it compresses


@sends_more.register(BlockCodec)
def _blocks_send_more(
    codec: BlockCodec, shares: Sequence[int], *, ranks: int, dtype: torch.dtype, itemsize: int
) -> bool:
    if codec.exchange == "allreduce":
        return sum(codec.wire_bytes(numel, dtype) for numel in shares) > sum(shares) * itemsize
    rows, sent = rows_of(codec, ranks), 0
    for numel in shares:
        fit = fitted(codec, numel, ranks=ranks, dtype=dtype)
        # In units of (W-1)/W bytes: all payloads are gathered, or each row travels twice.
        sent += _row_bytes(fit, numel, rows=rows, dtype=dtype) * (ranks if rows == 1 else 2 * rows)
    return sent > 2 * sum(shares) * itemsize


def _row_bytes(codec: BlockCodec, numel: int, *, rows: int, dtype: torch.dtype) -> int:
    return row_bytes(codec.planes(dtype), Grid(numel, rows, codec.block).blocks_per_row)
