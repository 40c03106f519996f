"""Gradient <-> wire bytes. Pure torch: nothing here knows of ``torch.distributed``."""

from __future__ import annotations

from lightning_dist.codecs.base import Codec, Payload, Plane
from lightning_dist.codecs.cast import BF16, FP16
from lightning_dist.codecs.int8 import Int8
from lightning_dist.codecs.none import NoCompression, Uncompressed

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (NoCompression, FP16, BF16, Int8)}
"""The table of codecs: what ``codec="..."`` accepts, and what the laws in the tests run over."""


def resolve_codec(codec: str | Codec) -> Codec:
    """A codec object from its name; an object is returned as it is.

    Raises:
        ValueError: unknown name or not a codec; the message lists the names.
    """
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str) or codec not in CODECS:
        raise ValueError(
            f"codec must be one of {', '.join(map(repr, CODECS))} or a codec object such as "
            f"lightning_dist.Int8(block_size=128), got {codec!r}"
        )
    return CODECS[codec]()


__all__ = [
    "BF16",
    "CODECS",
    "FP16",
    "Codec",
    "Int8",
    "NoCompression",
    "Payload",
    "Plane",
    "Uncompressed",
    "resolve_codec",
]
