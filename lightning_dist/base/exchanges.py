"""Table of exchanges, how payloads travel between the ranks of a flat network, and their sizes.

Codecs name their exchange. Standard library only, because predictions read the table too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple


class Collective(NamedTuple):
    """Bytes of a collective over a link, and messages in it that wait for one another."""

    nbytes: float
    rounds: int


@dataclass(frozen=True)
class ExchangeKind:
    """A row of :data:`EXCHANGES`.

    Args:
        name: as in ``exchange = "..."`` of a codec.
        implementation: class derived from one in ``lightning_dist.exchange.rounds``, or its place
            ``"module:Class"``.
        reduced_by: who adds payloads. ``"network"``: the collective, so codecs must be linear;
            derived from ``AllReduce``. ``"owners"``: each rank decodes and adds one row of all
            payloads, and encodes the mean; from ``TwoShot``. ``"everyone"``: each rank decodes and
            adds all payloads; from ``AllGather``.
        collectives: formula of the collectives, one after the other, over the link of the busiest
            node, of the bytes of a rank's payload and the ranks of every node.
        sparse: payloads are a small part of the gradient, so many elements travel together.
        pair: name of the exchange that two ranks use instead.
    """

    name: str
    implementation: Callable[..., Any] | str
    reduced_by: Literal["network", "owners", "everyone"]
    collectives: Callable[[float, Sequence[int]], tuple[Collective, ...]]
    sparse: bool = False
    pair: str | None = None

    @property
    def linear(self) -> bool:
        """Whether the network adds the payloads."""
        return self.reduced_by == "network"

    def among(self, ranks: int) -> ExchangeKind:
        """The exchange that so many ranks use."""
        return self if self.pair is None or ranks > 2 else EXCHANGES[self.pair]

    def rows(self, ranks: int) -> int:
        """Rows of a payload: one per rank where each rank reduces one."""
        return ranks if self.reduced_by == "owners" else 1

    def received(self, ranks: int) -> int:
        """Payloads that a rank decodes and adds at the end."""
        return ranks if self.reduced_by == "everyone" else 1

    def make(self, *arguments: Any, **named: Any) -> Any:
        """An exchange."""
        found = self.implementation
        return (resolve_name(found) if isinstance(found, str) else found)(*arguments, **named)


def _ring_allreduce(size: float, counts: Sequence[int]) -> tuple[Collective, ...]:
    world = sum(counts)
    return (Collective(2 * ((world - 1) / world * size), 2 * (world - 1)),)


def _ring_all_gather(size: float, counts: Sequence[int]) -> tuple[Collective, ...]:
    world = sum(counts)
    return (Collective((world - 1) * size, world - 1),)


def _two_shots(size: float, counts: Sequence[int]) -> tuple[Collective, ...]:
    world = sum(counts)
    leaving = max(count * (world - count) for count in counts) / world * size
    return Collective(leaving, world - 1), Collective((world - 1) / world * size, world - 1)


_ROUNDS = "lightning_dist.exchange.rounds"

EXCHANGES: dict[str, ExchangeKind] = {
    kind.name: kind
    for kind in (
        ExchangeKind("allreduce", f"{_ROUNDS}:AllReduce", "network", _ring_allreduce),
        ExchangeKind("gather", f"{_ROUNDS}:AllGather", "everyone", _ring_all_gather, sparse=True),
        ExchangeKind("two_shot", f"{_ROUNDS}:TwoShot", "owners", _two_shots, pair="gather"),
    )
}
"""Exchanges by name."""


def register_exchange(kind: ExchangeKind) -> None:
    """Add a row to :data:`EXCHANGES`, before a codec names it. Every rank must register it.

    Raises:
        ValueError: the name is taken.
    """
    taken = EXCHANGES.get(kind.name)
    if taken is not None and _place(taken) != _place(kind):
        raise ValueError(
            f"The name of an exchange must not be taken, got {kind.name!r} for {_place(kind)}, "
            f"which is the name of {_place(taken)}; choose another name"
        )
    EXCHANGES[kind.name] = kind


def _place(kind: ExchangeKind) -> str:
    found = kind.implementation
    return found if isinstance(found, str) else f"{found.__module__}:{found.__qualname__}"


UNIT_ELEMENTS = 1 << 18  # 1 MB of float32 gradient; measured best of 256 Ki and 1 Mi
_LEAST_ROW_ELEMENTS = 1 << 15  # many ranks: larger units rather than tiny messages
_LEAST_SPARSE_BYTES = 1 << 16  # 2.6 ms at 200 Mbit/s; a message costs 0.1 to 0.4 ms of both nodes
WHOLE_BUCKET = 1 << 62  # an accelerator's network needs no pieces, and each costs launches


def unit_elements(rows: int, *, sparse: float = 0.0, whole: bool = False) -> int:
    """Elements of one exchange, of which each of ``rows`` ranks reduces a part.

    Args:
        sparse: bytes per element of a payload that is gathered; 0: another exchange.
        whole: whether whole buckets travel, as on accelerators.
    """
    if whole:
        return WHOLE_BUCKET
    together = int(_LEAST_SPARSE_BYTES / sparse) if sparse else 0
    return max(UNIT_ELEMENTS, rows * _LEAST_ROW_ELEMENTS, together)
