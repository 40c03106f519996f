"""Reduce-scatter and all-gather of payloads with shares of any size: what happens inside a host.

Each rank of the group owns a share of what is reduced, perhaps an empty one. Where all shares are
equal this is the sharded form, where one rank owns everything the leader form.

gloo has no asynchronous reduce_scatter, and a ring adds in an order that depends on positions: an
all_to_all brings every owner what all ranks say of its share, in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dist.codecs.base import Payload, Plane
from lightning_dist.exchange import traffic
from lightning_dist.exchange.channel import Channel, PendingWork
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.topology import Topology


class ReduceScatterAllGather:
    """``blocks[r]`` blocks of a payload belong to rank ``r`` of the group.

    Two exchanges, in this order::

        own -> issue() -> wait() -> received         every rank's share of mine
        mine -> spread() -> wait() -> results        every owner's result, equal on all ranks

    ``send`` and ``receive`` are uint8 memory of at least :meth:`sizes`, in use from :meth:`start`
    until what was received is read, and from encoding into ``mine`` until the results are.
    Exchanges that do not overlap in this may share it.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        blocks: Sequence[int],
        *,
        channel: Channel,
        topology: Topology,
        send: Tensor,
        receive: Tensor,
    ) -> None:
        self._bytes, world = [row_bytes(planes, count) for count in blocks], len(blocks)
        mine = self._bytes[topology.rank]
        send = send[: sum(self._bytes)]
        received = receive[: world * mine].view(world, mine)
        parts = [part.unsqueeze(0) for part in torch.split_with_sizes(send, self._bytes)]
        self.own = [views(*of) for of in zip(parts, [planes] * world, blocks, strict=True)]
        """Payload ``(1, blocks[r], ...)`` for every rank ``r``; later each owner's result."""
        self.received = [views(row.unsqueeze(0), planes, blocks[topology.rank]) for row in received]
        """What every rank sent to this one, ``(1, blocks[own], ...)`` each."""
        self.mine = self.own[topology.rank]
        """Where the result of this rank's share is encoded."""
        self._send, self._parts, self._received = send, parts, received
        self._channel, self._rank = channel, topology.rank
        self._work: list[PendingWork] = []
        self.sent = traffic.scatter(self._bytes, topology) + traffic.spread(self._bytes, topology)

    @staticmethod
    def sizes(planes: Sequence[Plane], blocks: Sequence[int], *, rank: int) -> tuple[int, int]:
        """Bytes of ``send`` and of ``receive``."""
        of_ranks = [row_bytes(planes, count) for count in blocks]
        return sum(of_ranks), len(of_ranks) * of_ranks[rank]

    @property
    def results(self) -> list[Payload]:
        """What every owner encoded, in rank order."""
        return self.own

    def start(self) -> None:
        """Send everyone its share, asynchronous."""
        self._work = [
            self._channel.all_to_all(
                self._received.view(-1),
                self._send,
                [self._bytes[self._rank]] * len(self._bytes),
                self._bytes,
            )
        ]

    def spread(self) -> None:
        """Send everyone the result of this rank's share, asynchronous."""
        if len(set(self._bytes)) == 1:
            own = self._parts[self._rank].view(-1)  # gathered in place
            self._work = [self._channel.all_gather(self._send, own)]
            return
        self._work = [
            self._channel.broadcast(part.view(-1), owner=owner)
            for owner, part in enumerate(self._parts)
            if part.numel()
        ]

    def wait(self) -> None:
        """Until what was staggered has landed."""
        for work in self._work:
            work.wait()
        self._work = []
