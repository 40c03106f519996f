"""Payloads whose length only the sender knows."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import Payload
from lightning_dist.exchange import traffic
from lightning_dist.exchange.channel import PendingWork
from lightning_dist.exchange.rounds import Exchange
from lightning_dist.exchange.traffic import Sent


class AllGatherV(Exchange):
    """Every rank receives every rank's 1-D planes, which have as many elements as it likes.

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
