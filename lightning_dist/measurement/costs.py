"""Cost of a codec: bytes on the wire, and time on the machine."""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = ("none", "fp16", "int8", "int4", "sign", "topk", "powersgd")
"""Default codecs of predictions."""


@dataclass(frozen=True)
class CodecCost:
    """One codec, per element of the gradient; times are seconds of one thread.

    Args:
        name: as the user writes it.
        exchange: how its payloads travel, see ``Codec.exchange``.
        wire: bytes of the payload.
        encode: gradient and state to payload.
        decode: of one payload more.
        store: to gradient and state, beside the payloads.
        source: where the times are from.
        assumption: what has to be so for the bytes to be these; empty: nothing.
        compiled: the kernels that were measured were compiled.
    """

    name: str
    exchange: str
    wire: float
    encode: float
    decode: float
    store: float
    source: str = ""
    assumption: str = ""
    compiled: bool = False

    def __post_init__(self) -> None:
        known = self.exchange in ("allreduce", "gather", "two_shot")
        if not known or self.wire <= 0 or min(self.encode, self.decode, self.store) < 0:
            raise ValueError(f"costs must be those of a codec, got {self}")

    def decoding(self, payloads: int) -> float:
        """Seconds from so many payloads to the mean."""
        return self.store + payloads * self.decode
