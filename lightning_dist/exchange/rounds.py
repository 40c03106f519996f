"""One payload between all ranks: the collectives, and nothing of what the bytes mean.

Every exchange has the same three verbs, so that a caller can keep many in flight and still issue
the collectives of all of them in one order on every rank::

    start()          first collective, asynchronous
    start_second()   wait for it and issue the second one, if there is one
    wait()           wait for the last one; afterwards `payloads` are what every rank received, in
                     rank order and bit for bit the same on every rank

Buffers are allocated once and reused; an exchange is used for one step at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack, override

from lightning_dist.codecs.base import Payload, Plane
from lightning_dist.exchange import traffic
from lightning_dist.exchange.channel import Channel, PendingWork
from lightning_dist.exchange.traffic import Sent
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.topology import Topology

Allocate = Callable[[int], Tensor]
"""Bytes -> flat uint8 memory, aligned for any dtype."""

ReducePayload = Callable[[Payload, Payload], None]
"""``(received, mean)``: payloads of all ranks ``(W, ...)`` -> one of their mean ``(1, ...)``."""


class Where(TypedDict):
    """Arguments of every exchange: between whom, and in which memory."""

    channel: Channel
    topology: Topology  # of the channel's group
    device: torch.device
    allocate: NotRequired[Allocate | None]  # None: memory of its own


@dataclass(frozen=True)
class Section:
    """Typed views of what one unit has of every row of an exchange: all of it, or a part.

    Args:
        own: where the caller encodes.
        payloads: to be decoded and added in this order.
        received: what every rank said of this rank's share, in rank order.
        mean: the encoded mean of that share, ``(1, ...)``.
        sent: bytes of one use.
    """

    own: Payload
    payloads: Sequence[Payload]
    sent: Sent
    received: Sequence[Payload] = ()
    mean: Payload = ()
    own_stays = True


class Exchange(ABC):
    """See the module's docstring."""

    own: Payload
    """Where the caller encodes."""
    own_stays = True
    """Until the second collective; or the network writes its sum there at once."""
    payloads: Sequence[Payload]
    """To be decoded and added in this order."""
    sent: Sent
    """Bytes of one use."""

    def __init__(self, **where: Unpack[Where]) -> None:
        self._channel, self._topology = where["channel"], where["topology"]
        self._device, self._allocate = where["device"], where.get("allocate")
        self._work: Sequence[PendingWork] = ()
        self.nbytes = 0  # of the memory that is its own

    @abstractmethod
    def start(self) -> None: ...

    def start_second(self) -> None:  # noqa: B027  (nothing to do after a single collective)
        pass

    def wait(self) -> None:
        for work in self._work:
            work.wait()
        self._work = ()

    def _memory(self, size: int) -> Tensor:
        if self._allocate is not None:
            return self._allocate(size)
        self.nbytes += size
        return torch.zeros(size, dtype=torch.uint8, device=self._device)


class AllReduce(Exchange):
    """The network adds the payloads.

    Args:
        keep_own: keep what this rank encoded; its copy is added.
        weight: of that copy in the sum.
        in_place: memory of the caller's that is encoded already.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        blocks: int,
        *,
        keep_own: bool,
        weight: float = 1.0,
        in_place: Tensor | None = None,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(**where)
        self._weight = weight
        (plane,) = planes  # several planes cannot be added by one collective

        def buffer() -> Tensor:
            memory = self._memory(blocks * plane.bytes_per_block).view(plane.dtype)
            return memory.view(1, blocks, plane.per_block)

        self._summed = buffer() if in_place is None else in_place
        self.own = (buffer(),) if keep_own else (self._summed,)
        self.own_stays = keep_own
        self.payloads = ((self._summed,),)
        self.sent = traffic.ring_allreduce(self._summed.nbytes, self._topology)

    @override
    def start(self) -> None:
        if self._weight != 1:
            torch.mul(self.own[0], self._weight, out=self._summed)
        elif self.own_stays:
            self._summed.copy_(self.own[0])
        self._work = [self._channel.all_reduce(self._summed)]


class AllGather(Exchange):
    """Every rank receives every payload: for sparse ones, and the short way for two ranks.

    With W = 2 it moves the bytes of the two-shot exchange in one round and rounds once, not twice.
    With more ranks its bytes grow with W. ``own_bytes`` and ``payload_bytes`` are the uint8 memory
    behind ``own`` and ``payloads``.
    """

    def __init__(self, planes: Sequence[Plane], blocks: int, **where: Unpack[Where]) -> None:
        super().__init__(**where)
        topology = self._topology
        world, size = topology.world_size, row_bytes(planes, blocks)
        self.payload_bytes = self._memory(world * size).view(world, size)
        self.own_bytes = self.payload_bytes[topology.rank]  # gathered in place
        whole = self.section(planes, blocks)
        self.own, self.payloads, self.sent = whole.own, whole.payloads, whole.sent

    def section(self, planes: Sequence[Plane], blocks: int, *, before: int = 0) -> Section:
        """``blocks`` of every row, behind so many bytes of it."""
        size = row_bytes(planes, blocks)
        rows = self.payload_bytes[:, before : before + size]
        payloads = [views(row.unsqueeze(0), planes, blocks) for row in rows]
        sent = traffic.ring_all_gather(size, self._topology)
        return Section(payloads[self._topology.rank], payloads, sent)

    @override
    def start(self) -> None:
        self._work = [self._channel.all_gather(self.payload_bytes.view(-1), self.own_bytes)]


class TwoShot(Exchange):
    """all_to_all, decode and add this rank's shard, encode the mean, all_gather.

    Row ``r`` of the ``W`` rows of the payload is the shard of rank ``r``. ``own_bytes``,
    ``payload_bytes``, ``shard_bytes`` and ``mean_bytes`` are the uint8 memory behind the planes.

    Args:
        keep_own: keep what this rank encoded until the end; otherwise the means are received where
            it was.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        blocks: int,
        *,
        reduce: ReducePayload,
        keep_own: bool = True,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(**where)
        topology = self._topology
        world, size = topology.world_size, row_bytes(planes, blocks)

        def buffer() -> Tensor:
            return self._memory(world * size).view(world, size)

        self.own_bytes, self.shard_bytes = buffer(), buffer()
        self.payload_bytes = buffer() if keep_own else self.own_bytes
        self.mean_bytes = self.payload_bytes[topology.rank].unsqueeze(0)  # gathered in place
        whole = self.section(planes, blocks)
        self.own, self.payloads, self.sent = whole.own, whole.payloads, whole.sent
        (self.shards,), self.mean = whole.received, whole.mean
        """This rank's shard as every rank encoded it, ``(W, ...)``, and the mean of it."""
        self._reduce = reduce

    def section(self, planes: Sequence[Plane], blocks: int, *, before: int = 0) -> Section:
        """``blocks`` of every row, behind so many bytes of it."""
        size = row_bytes(planes, blocks)
        memory = (self.own_bytes, self.payload_bytes, self.shard_bytes, self.mean_bytes)
        own, payloads, shards, mean = (
            views(rows[:, before : before + size], planes, blocks) for rows in memory
        )
        scattered = traffic.all_to_all(self._topology.world_size * size, self._topology)
        sent = scattered + traffic.ring_all_gather(size, self._topology)
        return Section(own, (payloads,), sent, (shards,), mean)

    @override
    def start(self) -> None:
        shards, own = self.shard_bytes.view(-1), self.own_bytes.view(-1)
        self._work = [self._channel.all_to_all(shards, own)]

    @override
    def start_second(self) -> None:
        self.wait()
        self._reduce(self.shards, self.mean)
        results, mean = self.payload_bytes.view(-1), self.mean_bytes.view(-1)
        self._work = [self._channel.all_gather(results, mean)]


class ReduceScatterAllGather(Exchange):
    """``blocks[r]`` blocks of a payload belong to rank ``r`` of the group: inside a host.

    Where all shares are equal this is the sharded form, where one rank owns everything the leader
    form. gloo has no asynchronous reduce_scatter, and a ring adds in an order that depends on
    positions: an all_to_all brings every owner what all ranks say of its share, in rank order.
    The caller reduces between the two collectives::

        payloads -> start() -> wait() -> received          every rank's share of mine
        own -> start_second() -> wait() -> payloads        every owner's result, equal on all ranks

    The memory is in use from encoding until what was received is read, and from encoding into
    ``own`` until the results are. Exchanges that do not overlap in this may share it.
    ``payload_bytes``, ``received_bytes`` and ``own_bytes`` are the uint8 memory behind the planes.
    """

    def __init__(
        self, planes: Sequence[Plane], blocks: Sequence[int], **where: Unpack[Where]
    ) -> None:
        super().__init__(**where)
        self.rank = rank = self._topology.rank
        self._sizes = [row_bytes(planes, count) for count in blocks]
        self.payload_bytes = self._memory(sum(self._sizes))
        self._parts = self.payload_bytes.split_with_sizes(self._sizes)
        self.own_bytes = self._parts[rank]
        received = self._memory(len(blocks) * self._sizes[rank])
        self.received_bytes = received.view(len(blocks), self._sizes[rank])
        self._equal = len(set(self._sizes)) == 1
        whole = self.section(planes, blocks, before=[0] * len(blocks))
        self.own, self.payloads, self.sent = whole.own, whole.payloads, whole.sent
        """Payload ``(1, blocks[r], ...)`` for every rank ``r``; later each owner's result."""
        self.received = whole.received
        """What every rank sent to this one, ``(1, blocks[rank], ...)`` each."""

    def section(
        self, planes: Sequence[Plane], blocks: Sequence[int], *, before: Sequence[int]
    ) -> Section:
        """``blocks[r]`` of what belongs to rank ``r``, behind ``before[r]`` bytes of it."""
        rank, sizes = self._topology.rank, [row_bytes(planes, count) for count in blocks]
        payloads = [
            views(part[start : start + size].unsqueeze(0), planes, count)
            for part, start, size, count in zip(self._parts, before, sizes, blocks, strict=True)
        ]
        rows = self.received_bytes[:, before[rank] : before[rank] + sizes[rank]].unsqueeze(1)
        received = [views(row, planes, blocks[rank]) for row in rows]
        gathered = (
            traffic.ring_all_gather(sizes[rank], self._topology)
            if self._equal
            else traffic.broadcasts(sizes, self._topology)
        )
        sent = traffic.scatter(sizes, self._topology) + gathered
        return Section(payloads[rank], payloads, sent, received)

    @override
    def start(self) -> None:
        received = [self._sizes[self._topology.rank]] * len(self._sizes)
        landing, own = self.received_bytes.view(-1), self.payload_bytes
        self._work = [self._channel.all_to_all(landing, own, received, self._sizes)]

    @override
    def start_second(self) -> None:
        self.wait()
        if self._equal:
            self._work = [self._channel.all_gather(self.payload_bytes, self.own_bytes)]  # in place
            return
        self._work = [
            self._channel.broadcast(part, owner=owner)
            for owner, part in enumerate(self._parts)
            if len(part)
        ]


class AllGatherV(Exchange):
    """Every rank receives every rank's 1-D planes, whose length only the sender knows.

    ``own`` is set before every use; its planes have the same length. The first collective brings
    the lengths, the second the planes, padded to the longest. No planes are sent where all are
    empty.
    """

    own: Payload = ()
    sent = Sent()

    @override
    def start(self) -> None:
        # Not torch.tensor, which copies from the host and waits for an accelerator.
        length = torch.full((1,), len(self.own[0]), dtype=torch.int64, device=self._device)
        self._lengths = length.new_zeros(self._topology.world_size)
        self._work = [self._channel.all_gather(self._lengths, length)]
        self.sent = traffic.ring_all_gather(length.nbytes, self._topology)

    @override
    def start_second(self) -> None:
        self.wait()
        lengths = self._lengths.tolist()  # waits for a GPU: how much to receive must be known
        received = [plane.new_empty(len(lengths), max(lengths)) for plane in self.own]
        self.payloads = [
            tuple(plane[rank, :length] for plane in received) for rank, length in enumerate(lengths)
        ]
        if max(lengths):
            self._work = [self._gather(*pair) for pair in zip(self.own, received, strict=True)]

    def _gather(self, plane: Tensor, received: Tensor) -> PendingWork:
        padded = plane.new_zeros(received.shape[1])
        padded[: len(plane)] = plane
        self.sent += traffic.ring_all_gather(padded.nbytes, self._topology)
        bytes_in, bytes_out = padded.view(torch.uint8), received.view(torch.uint8).view(-1)
        return self._channel.all_gather(bytes_out, bytes_in)

    def release(self) -> None:
        """Forget the payloads."""
        self.own = self.payloads = ()
