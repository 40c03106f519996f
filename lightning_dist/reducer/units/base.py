"""Communication units: what is encoded, exchanged and decoded together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_dist.codecs.base import Codec
from lightning_dist.exchange.rounds import Exchange, RowExchange
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.codec_sample import CodecSample
from lightning_dist.reducer.plan.slices import ParameterSlice


class CommUnit(ABC):
    """Parts of one bucket in one exchange, used once a step in the order of the methods.

    Until :meth:`decode_and_commit` the bucket (the share, where the exchange is hierarchical) holds
    what is needed to compute the new state, and no state has changed.
    """

    exchange: Exchange
    first = last = True
    """Place among those that share the exchange; see :class:`JoinedUnit`."""
    samples: Callable[..., Iterator[CodecSample]] | None = None
    """``samples(sampler, scale=, step=)`` of gradients that are encoded with a loss, those of this
    unit and maybe of units after it; None: no others than those of a unit before it."""

    def begin(self) -> None:  # noqa: B027  (nothing to do where all ranks are equal)
        """Begin the reduction inside a node, asynchronous; nothing where there is none."""

    def receive(self) -> None:  # noqa: B027
        """Wait until what was begun inside the node is the gradient that is encoded."""

    @abstractmethod
    def encode(self, scale: Tensor, *, step: int) -> None:
        """Gradient and state -> payload. May change the bucket, never the state."""

    @abstractmethod
    def finite(self) -> Tensor:
        """0-d bool: whether what was encoded is finite. Between :meth:`encode` and the exchange."""

    def start(self) -> None:
        """First collective, asynchronous."""
        self.exchange.start()

    def start_second(self) -> None:
        """Second collective, where there is one; waits for the first."""
        self.exchange.start_second()

    def wait(self) -> None:
        """Wait until the last collective has landed."""
        self.exchange.wait()

    @abstractmethod
    def decode_and_commit(self, scale: Tensor) -> None:
        """Mean of all ranks -> bucket; and the new state, of what is finite."""

    def finish(self) -> None:  # noqa: B027
        """Wait until the bucket has a mean that came to one rank of the node."""

    @property
    def sent(self) -> Sent:
        """Bytes of the step, known after :meth:`wait`."""
        return self.exchange.sent

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers held between steps."""
        return self.exchange.nbytes


class JoinedUnit(CommUnit):
    """A unit whose payload may lie beside those of others, in the rows of one exchange.

    All of them have the methods of a unit called in one order.
    """

    row_bytes: Sequence[int]
    """Bytes needed of every row."""

    @abstractmethod
    def make_exchange(self, row_bytes: Sequence[int]) -> RowExchange:
        """An exchange of rows of so many bytes."""

    @abstractmethod
    def place(self, sizes: Sequence[int], before: Sequence[int]) -> None:
        """The exchange is there.

        Args:
            sizes: bytes of every row of it.
            before: bytes of every row before this unit's part.
        """


def join(units: Sequence[JoinedUnit]) -> None:
    """Give ``units`` of one kind and of one tensor their exchange, if there are any."""
    if not units:
        return
    row_bytes = [sum(sizes) for sizes in zip(*(unit.row_bytes for unit in units), strict=True)]
    exchange, before = units[0].make_exchange(row_bytes), [0] * len(row_bytes)
    for unit in units:
        unit.exchange, unit.first, unit.last = exchange, unit is units[0], unit is units[-1]
        unit.place(row_bytes, before)
        before = [sum(pair) for pair in zip(before, unit.row_bytes, strict=True)]


def staggered(units: Sequence[CommUnit]) -> Iterator[CommUnit]:
    """Every unit once the next exchange has begun: one crosses while another is reduced inside."""
    batches = _by_exchange(units)
    for batch, following in zip([[], *batches], [*batches, []], strict=True):
        for unit in following:
            unit.begin()
        yield from batch


def decode_all(units: Sequence[CommUnit], scale: Tensor) -> None:
    """Every mean into its bucket; one is spread inside the node while the next is decoded."""
    batches = _by_exchange(units)
    for batch, previous in zip([*batches, []], [[], *batches], strict=True):
        for unit in batch:
            unit.decode_and_commit(scale)
        for unit in previous:
            unit.finish()


def _by_exchange(units: Sequence[CommUnit]) -> list[list[CommUnit]]:
    batches: list[list[CommUnit]] = []
    for unit in units:
        if unit.first or not batches:
            batches.append([])
        batches[-1].append(unit)
    return batches


@dataclass
class CodecGroup:
    """The parameters of a bucket that share a codec."""

    codec: Codec
    slices: Sequence[ParameterSlice]
    units: Sequence[CommUnit]
    raw_bytes: int  # what DDP itself would send for these parameters
    keeps_state: bool  # whether anything is kept from one step to the next, on any rank
    residuals_sent: set[str] = field(default_factory=set)  # names, in this step, without a codec

    @property
    def sent(self) -> Sent:
        return sum((unit.sent for unit in self.units), Sent())
