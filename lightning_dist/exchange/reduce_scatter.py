"""Reduce-scatter and all-gather of payloads with shares of any size: what happens inside a host.

Each rank of the group owns a share of what is reduced, perhaps an empty one. Where all shares are
equal this is the sharded form, where one rank owns everything the leader form.

gloo has no asynchronous reduce_scatter, and a ring adds in an order that depends on positions: an
all_to_all brings every owner what all ranks say of its share, in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Unpack, override

from lightning_dist.codecs.base import Plane
from lightning_dist.exchange import traffic
from lightning_dist.exchange.rounds import Exchange, Where
from lightning_dist.exchange.wire import row_bytes, views


class ReduceScatterAllGather(Exchange):
    """``blocks[r]`` blocks of a payload belong to rank ``r`` of the group.

    Here the caller reduces between the two collectives::

        payloads -> start() -> wait() -> received          every rank's share of mine
        own -> start_second() -> wait() -> payloads        every owner's result, equal on all ranks

    The memory is in use from encoding until what was received is read, and from encoding into
    ``own`` until the results are. Exchanges that do not overlap in this may share it.
    """

    def __init__(
        self, planes: Sequence[Plane], blocks: Sequence[int], **where: Unpack[Where]
    ) -> None:
        super().__init__(**where)
        rank, self._sizes = self._topology.rank, [row_bytes(planes, count) for count in blocks]
        self._send = self._memory(sum(self._sizes))
        self._parts = self._send.split_with_sizes(self._sizes)
        received = self._memory(len(blocks) * self._sizes[rank])
        self._received = received.view(len(blocks), self._sizes[rank])
        self.payloads = [
            views(part.unsqueeze(0), planes, count)
            for part, count in zip(self._parts, blocks, strict=True)
        ]
        """Payload ``(1, blocks[r], ...)`` for every rank ``r``; later each owner's result."""
        self.received = [views(row.unsqueeze(0), planes, blocks[rank]) for row in self._received]
        """What every rank sent to this one, ``(1, blocks[rank], ...)`` each."""
        self.own = self.payloads[rank]
        self._equal = len(set(self._sizes)) == 1
        if self._equal:
            gathered = traffic.ring_all_gather(self._sizes[rank], self._topology)
        else:
            gathered = traffic.broadcasts(self._sizes, self._topology)
        self.sent = traffic.scatter(self._sizes, self._topology) + gathered

    @override
    def start(self) -> None:
        received = [self._sizes[self._topology.rank]] * len(self._sizes)
        landing = self._received.view(-1)
        self._work = [self._channel.all_to_all(landing, self._send, received, self._sizes)]

    @override
    def start_second(self) -> None:
        self.wait()
        if self._equal:
            own = self._parts[self._topology.rank]  # gathered in place
            self._work = [self._channel.all_gather(self._send, own)]
            return
        self._work = [
            self._channel.broadcast(part, owner=owner)
            for owner, part in enumerate(self._parts)
            if len(part)
        ]
