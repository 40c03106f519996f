"""Payloads whose length only the sender knows."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dist.codecs.base import Payload
from lightning_dist.exchange import traffic
from lightning_dist.exchange.channel import Channel, PendingWork
from lightning_dist.exchange.traffic import Sent
from lightning_dist.topology import Topology


class AllGatherV:
    """Every rank receives every rank's 1-D planes, which have as many elements as it likes.

    As :class:`~lightning_dist.exchange.rounds.Exchange`, but the payload is given to ``start``,
    which tells the lengths; ``start_second`` sends the planes, padded to the longest. No planes are
    sent where all are empty.
    """

    def __init__(self, *, channel: Channel, topology: Topology) -> None:
        self._channel, self._topology = channel, topology
        self.sent = Sent()

    def start(self, own: Payload) -> None:
        """Begin; all planes of ``own`` have the same length."""
        self._own = own
        # Not torch.tensor, which copies from the host and waits for an accelerator.
        length = torch.full((1,), len(own[0]), dtype=torch.int64, device=own[0].device)
        self._lengths = length.new_zeros(self._topology.world_size)
        self._work: list[PendingWork] = [self._channel.all_gather(self._lengths, length)]
        self.sent = traffic.ring_all_gather(length.nbytes, self._topology)

    def start_second(self) -> None:
        self.wait()
        longest = int(self._lengths.max())  # waits for a GPU: how much to receive must be known
        self._received = [self._gather(plane, longest) for plane in self._own if longest]

    def wait(self) -> None:
        for work in self._work:
            work.wait()
        self._work = []

    @property
    def payloads(self) -> list[Payload]:
        """What every rank sent, in rank order; after :meth:`wait`."""
        if not self._received:
            return [tuple(plane[:0] for plane in self._own)] * self._topology.world_size
        lengths = self._lengths.tolist()
        return [
            tuple(plane[rank, :length] for plane in self._received)
            for rank, length in enumerate(lengths)
        ]

    def release(self) -> None:
        """Forget the payloads."""
        self._own, self._received = (), []

    def _gather(self, plane: Tensor, longest: int) -> Tensor:
        padded = plane.new_zeros(longest)
        padded[: len(plane)] = plane
        received = plane.new_empty(self._topology.world_size, longest)
        bytes_in, bytes_out = padded.view(torch.uint8), received.view(torch.uint8).view(-1)
        self._work.append(self._channel.all_gather(bytes_out, bytes_in))
        self.sent += traffic.ring_all_gather(padded.nbytes, self._topology)
        return received
