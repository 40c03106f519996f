"""A reducer with two buckets, fed by a test, and networks of some ranks of a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from feeding import FakeBucket, Shapes, Tensors, feed
from torch import Tensor
from worlds import Rank

from lightning_dist.codecs import Codec
from lightning_dist.exchange.channel import Channel, WaitLimit
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.reducer.network import Network, in_levels
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings
from lightning_dist.topology import Topology

SHAPES = {"first": (40, 48), "second": (33, 50)}


class Model:
    """A reducer and a bucket for each parameter."""

    def __init__(
        self,
        network: Network,
        codec: str | Codec = "int8",
        *,
        commit: Literal["immediate", "deferred"] = "deferred",
        dtype: torch.dtype = torch.float32,
        shapes: Shapes = SHAPES,
    ) -> None:
        self._dtype, self._shapes = dtype, shapes
        self.parameters = {n: torch.zeros(shape, dtype=dtype) for n, shape in shapes.items()}
        names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        settings = Settings.check(codec, min_compress_numel=0, commit=commit)
        self.reducer = Reducer(names, settings=settings, network=network)
        self.buckets = DDPBuckets(self.reducer)

    def begin(self, given: Tensors) -> list[torch.futures.Future[Tensor]]:
        """Hand over the buckets of a step."""
        last = len(self.parameters) - 1
        return [
            self.buckets.reduce(FakeBucket(given[name].flatten().clone(), [p], i, last=i == last))
            for i, (name, p) in enumerate(self.parameters.items())
        ]

    def step(self, rank: int, step: int) -> list[Tensor]:
        return [future.wait() for future in self.begin(feed(rank, step, self._shapes, self._dtype))]


def among(rank: Rank, members: list[int], name: str, *, per_host: int = 1) -> Network:
    """A network of ``members``; each of them asks for it.

    It is hierarchical where ``per_host`` ranks of the world share a host, and there are two levels.
    """
    limit = WaitLimit()
    data, control = (
        Channel(rank.group(f"{name} {which}", members), limit=limit)
        for which in ("data", "control")
    )
    hosts = tuple(f"host{m // per_host}" for m in members)
    topology = Topology(hosts, members.index(rank.rank))
    flat, tree = Network(data, control, topology, torch.device("cpu")), topology.by_host()
    if not 1 < len(tree) < len(members):
        return flat

    def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
        return rank.group(f"{name} level", [members[each] for each in ranks])

    return in_levels(flat, tree, leader=False, new_group=new_group)
