"""The process groups and places that a reducer works with, flat or in levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_dist.accelerator import is_accelerator
from lightning_dist.exchange.channel import Channel, WaitLimit
from lightning_dist.topology import Topology
from lightning_dist.topology.groups import Level, Tree, levels_of, rows_of

NewGroup = Callable[[Sequence[int]], dist.ProcessGroup]
"""Ranks of the world -> a group of them. Every member calls it, for its groups in one order."""


@dataclass(frozen=True)
class Rows:
    """Holder of a row of the gathered state: a rank, or the ranks of a host together.

    The mean over the rows is what is owed to the model, whatever they are.
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
    row_of: tuple[int, ...] | None = None  # who shares the state of one row; None: nobody
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
        return [self.intra.data, *([self.control] if inter is None else inter.channels)]


@dataclass(frozen=True)
class IntraLevel:
    """The group of a :class:`~lightning_dist.topology.groups.Level` that this rank is in."""

    data: Channel  # payloads
    topology: Topology  # of the group
    level: Level
    inter: Network | None  # where its owners go on; None on ranks that do not


def in_levels(network: Network, tree: Tree, *, leader: bool, new_group: NewGroup) -> Network:
    """``network`` with the groups of ``tree``, made from the inside out. Collective."""
    topology = network.topology
    network = replace(network, row_of=rows_of(tree, world_size=topology.world_size))
    levels = dict(enumerate(levels_of(tree, leader=leader)))
    own = {number: level.group_of(topology.rank) for number, level in levels.items()}
    members = {number: ranks for number, ranks in own.items() if ranks is not None}
    groups = {number: new_group(ranks) for number, ranks in members.items()}
    outermost, found = max(levels), network
    for number in reversed(groups):
        channel = Channel(groups[number], name=_name(number), limit=network.limit)
        inside, intra = topology.among(members[number]), None
        if number < outermost:
            inter = found if number + 1 in groups else None
            intra = IntraLevel(channel, inside, levels[number], inter)
        found = replace(network, data=channel, topology=inside, intra=intra)
    places = replace(topology, intra_group=groups[0], inter_group=groups.get(outermost))
    return replace(network, intra=found.intra, topology=places)


def _name(level: int) -> str:
    """Of a channel, by its level from the inside out."""
    return "intra" if level == 0 else "inter" if level == 1 else f"inter{level}"
