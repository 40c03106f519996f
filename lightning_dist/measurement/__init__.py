"""Time and bytes of codecs and exchanges: clocks, microbenchmarks, expected traffic.

Here is the cost of a codec: bytes on the wire, and time on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_dist.base.exchanges import EXCHANGES

CANDIDATES = ("none", "fp16", "int8", "int4", "sign", "topk", "powersgd")
"""Default codecs of predictions."""


@dataclass(frozen=True)
class CodecCost:
    """Cost of a codec per element of the gradient; times are seconds of one thread.

    Args:
        name: as in ``codec="..."``.
        exchange: see ``Codec.exchange``.
        wire: bytes of the payload.
        encode: from gradient and state to payload.
        decode: of each payload.
        store: of the gradient and the state, once.
        source: of the times.
        assumption: on which the bytes depend; empty: none.
        compiled: whether the measured kernels were compiled.
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
        known = self.exchange in EXCHANGES
        if not known or self.wire <= 0 or min(self.encode, self.decode, self.store) < 0:
            raise ValueError(f"costs must be those of a codec, got {self}")

    def scaled(self, factor: float) -> CodecCost:
        """Cost with the same bytes and ``factor`` times the seconds."""
        encode, decode, store = (factor * x for x in (self.encode, self.decode, self.store))
        return replace(self, encode=encode, decode=decode, store=store)

    def decoding(self, payloads: int) -> float:
        """Seconds from so many payloads to their mean."""
        return self.store + payloads * self.decode
