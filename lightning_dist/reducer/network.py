"""The process groups and places that a reducer works with, flat or in two levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.exchange.rounds import Allocate, Where
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.levels import Level, Nodes, levels_of, rows_of

NewGroup = Callable[[Sequence[int]], dist.ProcessGroup]
"""Ranks of the world -> a group of them. Every member calls it, for its groups in one order."""


@dataclass(frozen=True)
class Rows:
    """Holder of a row of the gathered state: a rank, or the ranks of a node together.

    The mean over the rows is the residual of the model, whatever they are.
    """

    row_of: tuple[int, ...]  # of every rank
    rank: int

    @property
    def count(self) -> int:
        return max(self.row_of) + 1

    @property
    def own(self) -> int:
        return self.row_of[self.rank]

    @property
    def first(self) -> bool:
        """Whether this rank is the first of its row."""
        return self.row_of.index(self.own) == self.rank


@dataclass(frozen=True)
class Network:
    """Groups over which gradients are averaged: all ranks of ``data``, or ``intra`` smaller groups
    first.
    """

    data: Channel  # payloads
    control: Channel  # a few flags a step, which must not queue behind payloads
    topology: Topology
    device: torch.device
    intra: IntraLevel | None = None
    row_of: tuple[int, ...] | None = None  # row of the state of every rank; None: one for each
    plans_for: torch.device | None = None  # another device, of which bytes are counted

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def whole_buckets(self) -> bool:
        """Whether units are whole buckets and not pieces that overlap."""
        return is_accelerator(self.plans_for or self.device)

    @property
    def limit(self) -> WaitLimit:
        """Of every wait for a collective of the network."""
        return self.data.limit

    def where(self, allocate: Allocate | None = None) -> Where:
        """Arguments of an exchange of payloads, in memory of its own by default."""
        return Where(
            channel=self.data, topology=self.topology, device=self.device, allocate=allocate
        )

    @property
    def state(self) -> Channel:
        """For state between steps: not watched, as it belongs to no step."""
        return Channel(self.data.group, name="state", limit=self.limit)

    @property
    def rows(self) -> Rows:
        """Rows of the gathered state of all ranks."""
        return Rows(self.row_of or tuple(range(self.world_size)), self.rank)

    @property
    def channels(self) -> list[Channel]:
        """Used by this rank in a step: of payloads from the inside out, and of flags."""
        if self.intra is None:
            return [self.data, self.control]
        inter = self.intra.inter
        return [self.intra.data, *([] if inter is None else [inter.data]), self.control]


@dataclass(frozen=True)
class IntraLevel:
    """The group of the ranks of this node."""

    data: Channel  # payloads
    topology: Topology  # of the group
    level: Level
    inter: Network | None  # between nodes, flat; None on ranks that do not go on there


def in_levels(network: Network, nodes: Nodes, *, leader: bool, new_group: NewGroup) -> Network:
    """``network`` with a group inside ``nodes`` and then one between them. Collective."""
    topology, limit = network.topology, network.limit
    network = replace(network, row_of=rows_of(nodes))
    inside, between = levels_of(nodes, leader=leader)
    own, others = inside.group_of(topology.rank), between.group_of(topology.rank)
    assert own is not None, "every rank is on a node"
    intra, inter = new_group(own), None if others is None else new_group(others)
    outer = None
    if inter is not None and others is not None:
        channel, flags = (Channel(inter, name=name, limit=limit) for name in ("inter", "control"))
        outer = replace(network, data=channel, control=flags, topology=topology.among(others))
    level = IntraLevel(
        Channel(intra, name="intra", limit=limit), topology.among(own), inside, outer
    )
    places = replace(topology, intra_group=intra, inter_group=inter)
    return replace(network, intra=level, topology=places)
