"""Collectives of one payload between all ranks, and nothing of what the bytes mean.

Every exchange has the same three verbs, so that a caller can keep many in flight and still issue
the collectives of all of them in one order on every rank::

    start()          first collective, asynchronous
    start_second()   wait for it and issue the second one, if there is one
    wait()           wait for the last one

The caller encodes into the memory of an exchange before, and reads what it received there after.
That memory is bytes; a :class:`Section` has typed views of it. Buffers are allocated once and
reused; an exchange is used for one step at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]
from typing_extensions import Unpack, override

from lightning_dist.codecs.base import Payload, Plane
from lightning_dist.ranks import Topology, traffic
from lightning_dist.ranks.channel import Channel, PendingWork
from lightning_dist.ranks.traffic import Sent


@torch.no_grad()
def replicate(tensors: Mapping[str, Tensor], channel: Channel) -> None:
    """Copy ``tensors`` of rank 0 of the channel's group to all its ranks, in place.

    Collective. A collective takes the memory of a tensor, from its first element on, whatever its
    strides: so it is sent from contiguous memory, and copied element by element. Of a tensor that
    was expanded the elements that are in memory are sent.

    Args:
        tensors: by name, in an order that is equal on all ranks.

    Raises:
        ValueError: elements of a tensor overlap in memory otherwise.
    """
    for name, tensor in tensors.items():
        held = _in_memory(tensor)
        if _overlaps(held):
            raise ValueError(
                f"{name!r} must not have elements that overlap in memory, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}; register a clone of it"
            )
        sent = held.contiguous()
        channel.broadcast(sent, owner=0).wait()
        if sent.data_ptr() != held.data_ptr():
            held.copy_(sent)


def bits_digest(tensor: Tensor) -> int:
    """64-bit digest of the elements of ``tensor``, in an int64."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return int.from_bytes(blake2b(content.numpy().data, digest_size=8).digest(), "big", signed=True)


def _in_memory(tensor: Tensor) -> Tensor:
    """Part of ``tensor`` without the dimensions that it was expanded over."""
    return tensor.detach()[
        tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())
    ]


def _overlaps(tensor: Tensor) -> bool:
    """True unless each dimension steps over all elements of the dimensions inside it."""
    inside = 0
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dimension for dimension in dimensions if dimension[1] > 1):
        if stride <= inside:
            return True
        inside += stride * (size - 1)
    return False


_ALIGN = 8  # every plane of every row starts at a multiple: typed views need it


def row_bytes(planes: Sequence[Plane], blocks: int) -> int:
    """Bytes of one row that holds ``blocks`` blocks of every plane, padding included."""
    return sum(_padded(plane.bytes_per_block * blocks) for plane in planes)


def views(buffer: Tensor, planes: Sequence[Plane], blocks: int) -> Payload:
    """Planes of ``buffer (rows, row_bytes)`` as tensors ``(rows, blocks, per_block)``.

    The views share the buffer's memory but not its storage object: torch.compile refuses to write
    to two views of different dtype that it can see to be of one storage, and these never overlap.
    """
    if not blocks:  # nothing that could be shared, at places that need not be aligned
        return tuple(buffer.new_empty((len(buffer), 0, p.per_block), dtype=p.dtype) for p in planes)
    payload = []
    start = 0
    for plane in planes:
        size = plane.bytes_per_block * blocks
        typed = buffer[:, start : start + size].view(plane.dtype)
        shaped = typed.view(len(buffer), blocks, plane.per_block)
        # On the meta device there is no memory, only sizes: a plan whose bytes are counted. By a
        # capsule: a tensor as the argument is refused on devices that torch itself does not have.
        payload.append(shaped if shaped.is_meta else from_dlpack(to_dlpack(shaped)))
        start += _padded(size)
    return tuple(payload)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class PayloadMemory:
    """uint8 buffers that are used again at the turn after the next.

    Tensors take turns with the memory of their payloads (one is decoded before the next but one is
    encoded), and so do consecutive units with that of the exchange inside a node, where
    ``staggered`` and ``decode_all`` let at most two work at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[Hashable, Tensor] = {}
        self._turn = self._taken = 0

    def restart(self, turn: int | None = None) -> None:
        """Give out the memory of ``turn`` (0 or 1) from its beginning; None: the other one."""
        self._turn, self._taken = 1 - self._turn if turn is None else turn, 0

    def clear(self) -> None:
        """Give out new buffers from now on."""
        self._buffers = {}

    def take(self, size: int) -> Tensor:
        """Flat uint8 memory of ``size`` bytes, for the next exchange of the turn."""
        key, self._taken = (self._turn, self._taken), self._taken + 1
        return self.at(key, size)

    def at(self, key: Hashable, size: int) -> Tensor:
        """Flat uint8 memory of ``size`` bytes for what has this ``key``."""
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:  # those who were given the smaller one keep it
            buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._buffers[key] = buffer
        return buffer[:size]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


Allocate = Callable[[int], Tensor]
"""Bytes -> flat uint8 memory, aligned for any dtype."""


class ExchangeArguments(TypedDict):
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
        payloads: what every rank received, bit for bit the same on every rank; to be decoded and
            added in this order.
        received: what every rank said of this rank's share, in rank order.
        mean: of that share, where the caller encodes it between the two collectives.
        sent: bytes of one use.
    """

    own: Payload
    payloads: Sequence[Payload]
    sent: Sent
    received: Sequence[Payload] = ()
    mean: Payload = ()


class Exchange(ABC):
    """See the module's docstring. ``work`` are the collectives in flight on ``channel``."""

    sent: Sent
    """Bytes of one use."""

    def __init__(self, **where: Unpack[ExchangeArguments]) -> None:
        self.channel, self._topology = where["channel"], where["topology"]
        self._device, self._allocate = where["device"], where.get("allocate")
        self.work: Sequence[PendingWork] = ()
        self.nbytes = 0  # of the memory that is its own

    @abstractmethod
    def start(self) -> None: ...

    def start_second(self) -> None:  # noqa: B027  (nothing to do after a single collective)
        pass

    def wait(self) -> None:
        for work in self.work:
            work.wait()
        self.work = ()

    def _memory(self, size: int) -> Tensor:
        if self._allocate is not None:
            return self._allocate(size)
        self.nbytes += size
        return torch.zeros(size, dtype=torch.uint8, device=self._device)


class RowExchange(Exchange):
    """An exchange of rows of bytes, of which several units may each have a :class:`Section`."""

    own_bytes: Tensor
    """Buffer into which callers encode."""
    received_bytes: Tensor
    mean_bytes: Tensor
    """Payloads of all ranks for this rank's row, and their mean, where owners reduce."""
    payload_bytes: Tensor
    """Payloads that every rank received."""

    @abstractmethod
    def section(self, planes: Sequence[Plane], blocks: int, *, before: int = 0) -> Section:
        """``blocks`` of every row, behind so many bytes of it; the rows are of one length."""


class AllReduce(Exchange):
    """The network adds the payloads; ``whole`` is all of them.

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
        **where: Unpack[ExchangeArguments],
    ) -> None:
        super().__init__(**where)
        self._weight = weight
        (plane,) = planes  # several planes cannot be added by one collective

        def buffer() -> Tensor:
            memory = self._memory(blocks * plane.bytes_per_block).view(plane.dtype)
            return memory.view(1, blocks, plane.per_block)

        summed = buffer() if in_place is None else in_place
        own = (buffer(),) if keep_own else (summed,)
        self.sent = traffic.ring_allreduce(summed.nbytes, self._topology)
        self.whole = Section(own, ((summed,),), self.sent)

    @override
    def start(self) -> None:
        (own,), ((summed,),) = self.whole.own, self.whole.payloads
        if self._weight != 1:
            torch.mul(own, self._weight, out=summed)
        elif own is not summed:
            summed.copy_(own)
        self.work = [self.channel.all_reduce(summed)]


class AllGather(RowExchange):
    """Every rank receives every payload: for sparse ones, and the short way for two ranks.

    With W = 2 it moves the bytes of the two-shot exchange in one round and rounds once, not twice.
    With more ranks its bytes grow with W.

    Args:
        size: bytes of a payload, which is one row.
    """

    def __init__(self, size: int, **where: Unpack[ExchangeArguments]) -> None:
        super().__init__(**where)
        world, rank = self._topology.world_size, self._topology.rank
        self.payload_bytes = self._memory(world * size).view(world, size)
        self.own_bytes = self.payload_bytes[rank]  # gathered in place
        self.sent = traffic.ring_all_gather(size, self._topology)

    @override
    def section(self, planes: Sequence[Plane], blocks: int, *, before: int = 0) -> Section:
        size = row_bytes(planes, blocks)
        rows = self.payload_bytes[:, before : before + size]
        payloads = [views(row.unsqueeze(0), planes, blocks) for row in rows]
        sent = traffic.ring_all_gather(size, self._topology)
        return Section(payloads[self._topology.rank], payloads, sent)

    @override
    def start(self) -> None:
        self.work = [self.channel.all_gather(self.payload_bytes.view(-1), self.own_bytes)]


class TwoShot(RowExchange):
    """all_to_all; the caller adds what it received of its share and encodes the mean; all_gather.

    ``sizes[r]`` bytes of a payload, its row ``r``, are the share of rank ``r``::

        own -> start() -> wait() -> received          every rank's share of mine
        mean -> start_second() -> wait() -> payloads  every owner's mean, equal on all ranks

    Between the ranks of a flat network all shares are equal; inside a node they may differ, up to
    the leader form, where one rank owns everything. gloo has no asynchronous reduce_scatter, and a
    ring adds in an order that depends on positions: an all_to_all brings every owner what all ranks
    say of its share, in rank order.

    The memory is in use from encoding until what was received is read, and from encoding the mean
    until the payloads are. Exchanges that do not overlap in this may share it. ``parts`` are the
    rows of ``payload_bytes``.

    Args:
        keep_own: keep what this rank encoded until the end; otherwise the means are received where
            it was.
    """

    def __init__(
        self, sizes: Sequence[int], *, keep_own: bool = False, **where: Unpack[ExchangeArguments]
    ) -> None:
        super().__init__(**where)
        self.rank, self._sizes = self._topology.rank, list(sizes)
        self._equal = len(set(sizes)) == 1
        own = self._sizes[self.rank]
        self.own_bytes = self._memory(sum(sizes))
        self.received_bytes = self._memory(len(sizes) * own).view(len(sizes), own)
        self.payload_bytes = self._memory(sum(sizes)) if keep_own else self.own_bytes
        self.parts = self.payload_bytes.split_with_sizes(self._sizes)
        self.mean_bytes = self.parts[self.rank]  # gathered in place
        self.sent = self.sent_for(self._sizes)

    def sent_for(self, sizes: Sequence[int]) -> Sent:
        """Bytes of one use of rows of ``sizes``, all of the exchange or parts."""
        topology = self._topology
        gathered = (
            traffic.ring_all_gather(sizes[self.rank], topology)
            if self._equal
            else traffic.broadcasts(sizes, topology)
        )
        return traffic.scatter(sizes, topology) + gathered

    @override
    def section(self, planes: Sequence[Plane], blocks: int, *, before: int = 0) -> Section:
        world, size = len(self._sizes), row_bytes(planes, blocks)
        memory = (self.own_bytes, self.payload_bytes, self.received_bytes)
        own, payload, received = (
            views(rows.view(world, -1)[:, before : before + size], planes, blocks)
            for rows in memory
        )
        mean = views(self.mean_bytes[before : before + size].unsqueeze(0), planes, blocks)
        return Section(own, (payload,), self.sent_for([size] * world), (received,), mean)

    @override
    def start(self) -> None:
        splits = () if self._equal else ([self._sizes[self.rank]] * len(self._sizes), self._sizes)
        received = self.received_bytes.view(-1)
        self.work = [self.channel.all_to_all(received, self.own_bytes, *splits)]

    @override
    def start_second(self) -> None:
        self.wait()
        if self._equal:
            self.work = [self.channel.all_gather(self.payload_bytes, self.mean_bytes)]
            return
        self.work = [
            self.channel.broadcast(part, owner=owner)
            for owner, part in enumerate(self.parts)
            if len(part)
        ]


class AllGatherV(Exchange):
    """Every rank receives every rank's 1-D planes, whose length only the sender knows.

    ``own`` is set before every use; its planes have the same length. The first collective brings
    the lengths, the second the planes, padded to the longest. No planes are sent where all are
    empty.
    """

    own: Payload = ()
    payloads: Sequence[Payload] = ()
    sent = Sent()

    @override
    def start(self) -> None:
        # Not torch.tensor, which copies from the host and waits for an accelerator.
        length = torch.full((1,), len(self.own[0]), dtype=torch.int64, device=self._device)
        self._lengths = length.new_zeros(self._topology.world_size)
        self.work = [self.channel.all_gather(self._lengths, length)]
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
            self.work = [self._gather(*pair) for pair in zip(self.own, received, strict=True)]

    def _gather(self, plane: Tensor, received: Tensor) -> PendingWork:
        padded = plane.new_zeros(received.shape[1])
        padded[: len(plane)] = plane
        self.sent += traffic.ring_all_gather(padded.nbytes, self._topology)
        bytes_in, bytes_out = padded.view(torch.uint8), received.view(torch.uint8).view(-1)
        return self.channel.all_gather(bytes_out, bytes_in)

    def release(self) -> None:
        """Forget the payloads."""
        self.own = self.payloads = ()
