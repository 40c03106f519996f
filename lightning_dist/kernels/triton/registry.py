"""Codecs with kernels: each is two device functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

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
_Functions = tuple[Any, Any, Callable[[Any], float]]
_functions: dict[type[Codec], _Functions] = {}


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
    _functions[codec] = encode, level, option


def device_codec(codec: Codec) -> DeviceCodec | None:
    """The device functions of ``codec``; None where it has none."""
    found = _functions.get(type(codec))
    # What is not fusable, such as a matrix product, adds in an order that a library chooses.
    if found is None or not codec.fusable or codec.block > _LARGEST_BLOCK:
        return None
    encode, level, option = found
    block_codec = cast(BlockCodec, codec)  # no others are registered
    return DeviceCodec(block_codec, encode, level, getattr(codec, "levels", 0), option(codec))


register_kernels(NoCompression, encode=None, level=None)
register_kernels(Uncompressed, encode=None, level=None)
register_kernels(Int8, encode=functions.int8_encode, level=functions.int8_level)
register_kernels(Int4, encode=functions.int4_encode, level=functions.offset_level)
register_kernels(FP8, encode=functions.fp8_encode, level=functions.fp8_level)
register_kernels(Sign, encode=functions.sign_encode, level=functions.sign_level)
register_kernels(
    QSGD,
    encode=functions.qsgd_encode,
    level=functions.offset_level,
    option=lambda codec: codec.norm == "l2",
)
register_kernels(
    TernGrad,
    encode=functions.terngrad_encode,
    level=functions.offset_level,
    option=lambda codec: codec.clip_sigma,
)
