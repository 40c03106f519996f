"""Codecs with kernels: each is two device functions.

Importing this module does not import Triton, so that a codec can be registered on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lightning_dist.codecs.base import BlockCodec, Codec


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
    functions_of_codec = _registered.get(type(codec)) or functions.get(type(codec))
    # What is not fusable, such as a matrix product, adds in an order that a library chooses.
    if functions_of_codec is None or not codec.fusable or codec.block > _LARGEST_BLOCK:
        return None
    encode, level, option = functions_of_codec
    block_codec = cast(BlockCodec, codec)  # no others are registered
    return DeviceCodec(block_codec, encode, level, getattr(codec, "levels", 0), option(codec))
