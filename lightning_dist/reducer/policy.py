"""Which codec a parameter gets at a step. Policy lives here and never in an algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.codecs import Codec, NoCompression, Uncompressed
from lightning_dist.settings import Settings


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    offset: int  # elements from the start of the bucket
    numel: int
    ndim: int


def compression_is_on(settings: Settings, *, step: int) -> bool:
    """Whether synchronised step ``step`` (from 0) compresses at all."""
    return step >= settings.start_step


def choose_codec(settings: Settings, slot: Slot, *, step: int) -> Codec:
    """Small and 1-D tensors stay uncompressed: few bytes, and the most sensitive ones."""
    if not compression_is_on(settings, step=step):
        return NoCompression()
    worth_it = slot.ndim >= 2 and slot.numel >= settings.min_compress_numel
    if worth_it or settings.min_compress_numel == 0 or settings.codec.lossless:
        return settings.codec
    return Uncompressed() if settings.codec.exchange == "two_shot" else NoCompression()
