"""Codecs with kernels. A codec is two device functions, and one entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_dist.codecs import FP8, QSGD, Int4, Int8, NoCompression, Sign, TernGrad, Uncompressed
from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.kernels.triton import codecs as functions


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


def device_codec(codec: Codec) -> DeviceCodec | None:
    """The device functions of ``codec``; None where it has none."""
    make = _DEVICE_CODECS.get(type(codec))
    found = None if make is None else make(codec)
    return None if found is None or found.codec.block > _LARGEST_BLOCK else found


_DEVICE_CODECS: dict[type[Codec], Callable[[Any], DeviceCodec | None]] = {
    NoCompression: DeviceCodec,
    Uncompressed: DeviceCodec,
    Int8: lambda of: DeviceCodec(of, functions.int8_encode, functions.int8_level, levels=127),
    # The rotation is a matrix product, whose order of adding is the library's.
    Int4: lambda of: (
        None
        if of.hadamard
        else DeviceCodec(of, functions.int4_encode, functions.offset_level, levels=7)
    ),
    FP8: lambda of: DeviceCodec(of, functions.fp8_encode, functions.fp8_level, levels=448),
    Sign: lambda of: DeviceCodec(of, functions.sign_encode, functions.sign_level),
    QSGD: lambda of: DeviceCodec(
        of, functions.qsgd_encode, functions.offset_level, of.levels, option=of.norm == "l2"
    ),
    TernGrad: lambda of: DeviceCodec(
        of, functions.terngrad_encode, functions.offset_level, levels=1, option=of.clip_sigma
    ),
}
