"""One payload between all ranks: the collectives, and nothing of what the bytes mean.

Every exchange has the same three verbs, so that a caller can keep many in flight and still issue
the collectives of all of them in one order on every rank::

    issue()     first collective, asynchronous
    advance()   wait for it and issue the second one, if there is one
    wait()      wait for the last one; afterwards `payloads` are what every rank received, in rank
                order and bit for bit the same on every rank

Buffers are allocated once and reused; an exchange is used for one step at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_dist.codecs.base import Payload, Plane
from lightning_dist.exchange import traffic
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.traffic import Sent
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.topology import Topology

Allocate = Callable[[int], Tensor]
"""Bytes -> flat uint8 memory, aligned for any dtype."""

ReducePayload = Callable[[Payload, Payload], None]
"""``(received, mean)``: payloads of all ranks ``(W, ...)`` -> one of their mean ``(1, ...)``."""


class Exchange(ABC):
    """See the module's docstring. ``own (rows, ...)`` is where the caller encodes."""

    own: Payload
    own_stays = True  # until the second collective; or the network writes its sum there at once
    payloads: Sequence[Payload]  # to be decoded and added in this order
    sent: Sent  # bytes of one use
    nbytes: int  # of the buffers that are its own

    @abstractmethod
    def start(self) -> None: ...

    def start_second(self) -> None:  # noqa: B027  (nothing to do after a single collective)
        pass

    @abstractmethod
    def wait(self) -> None: ...


class AllReduce(Exchange):
    """The network adds the payloads. ``keep_own`` keeps a copy of what this rank encoded."""

    def __init__(
        self,
        planes: Sequence[Plane],
        blocks: int,
        *,
        channel: Channel,
        topology: Topology,
        device: torch.device,
        keep_own: bool,
        in_place: Tensor | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        (plane,) = planes  # several planes cannot be added by one collective
        size = blocks * plane.bytes_per_block

        def buffer() -> Tensor:
            memory = (allocate or _zeros(device))(size).view(plane.dtype)
            return memory.view(1, blocks, plane.per_block)

        self._summed = buffer() if in_place is None else in_place
        self.own = (buffer(),) if keep_own else (self._summed,)
        self.own_stays = keep_own
        self.payloads = ((self._summed,),)
        self.sent = traffic.ring_allreduce(self._summed.nbytes, topology)
        self.nbytes = 0 if allocate else self._summed.nbytes * (keep_own + (in_place is None))
        self._channel = channel

    def start(self) -> None:
        if self.own[0] is not self._summed:
            self._summed.copy_(self.own[0])
        self._work = self._channel.all_reduce(self._summed)

    def wait(self) -> None:
        self._work.wait()


class AllGather(Exchange):
    """Every rank receives every payload: for sparse ones, and the short way for two ranks.

    With W = 2 it moves the bytes of the two-shot exchange in one round and rounds once, not twice.
    With more ranks its bytes grow with W. ``own_bytes`` and ``payload_bytes`` are the uint8 memory
    behind ``own`` and ``payloads``.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        blocks: int,
        *,
        channel: Channel,
        topology: Topology,
        device: torch.device,
        allocate: Allocate | None = None,
    ) -> None:
        world, size = topology.world_size, row_bytes(planes, blocks)
        self._received = (allocate or _zeros(device))(world * size).view(world, size)
        self._send = self._received[topology.rank]  # gathered in place
        self.own_bytes, self.payload_bytes = self._send, self._received
        self.payloads = [views(row.unsqueeze(0), planes, blocks) for row in self._received]
        self.own = self.payloads[topology.rank]
        self.sent = traffic.ring_all_gather(size, topology)
        self.nbytes = 0 if allocate else self._received.nbytes
        self._channel = channel

    def start(self) -> None:
        self._work = self._channel.all_gather(self._received.view(-1), self._send)

    def wait(self) -> None:
        self._work.wait()


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
        channel: Channel,
        topology: Topology,
        device: torch.device,
        keep_own: bool = True,
        allocate: Allocate | None = None,
    ) -> None:
        world, size = topology.world_size, row_bytes(planes, blocks)

        def buffer() -> Tensor:
            return (allocate or _zeros(device))(world * size).view(world, size)

        self._send, self._shards = buffer(), buffer()
        self._result = buffer() if keep_own else self._send
        self._mean = self._result[topology.rank].unsqueeze(0)  # gathered in place
        self.own_bytes, self.payload_bytes = self._send, self._result
        self.shard_bytes, self.mean_bytes = self._shards, self._mean
        self.own = views(self._send, planes, blocks)
        self.shards = views(self._shards, planes, blocks)
        """This rank's shard as every rank encoded it, ``(W, ...)``."""
        self.mean = views(self._mean, planes, blocks)
        """The encoded mean of this rank's shard, ``(1, ...)``."""
        self.payloads = (views(self._result, planes, blocks),)
        self.sent = traffic.all_to_all(world * size, topology) + traffic.ring_all_gather(
            size, topology
        )
        self.nbytes = 0 if allocate else (2 + keep_own) * self._send.nbytes
        self._reduce, self._channel = reduce, channel

    def start(self) -> None:
        self._work = self._channel.all_to_all(self._shards.view(-1), self._send.view(-1))

    def start_second(self) -> None:
        self._work.wait()
        self._reduce(self.shards, self.mean)
        self._work = self._channel.all_gather(self._result.view(-1), self._mean.view(-1))

    def wait(self) -> None:
        self._work.wait()


def _zeros(device: torch.device) -> Allocate:
    return lambda size: torch.zeros(size, dtype=torch.uint8, device=device)
