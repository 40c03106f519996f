"""A reducer with two buckets, fed by a test, and networks of some ranks of a world."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from feeding import FakeBucket, Shapes, Tensors, feed
from torch import Tensor
from torch.futures import Future
from worlds import Rank

from lightning_dist.codecs import Codec
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.reducer.network import Network, in_levels
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.buckets import DDPBuckets

SHAPES = {"first": (40, 48), "second": (33, 50)}


class Model:
    """A reducer and a bucket for each parameter."""

    def __init__(
        self,
        network: Network,
        codec: str | Codec = "int8",
        *,
        state_update: Literal["immediate", "deferred"] = "deferred",
        dtype: torch.dtype = torch.float32,
        shapes: Shapes = SHAPES,
        **settings: Any,
    ) -> None:
        self._dtype, self._shapes = dtype, shapes
        self.parameters = {n: torch.zeros(shape, dtype=dtype) for n, shape in shapes.items()}
        self.flats = {n: torch.zeros(p.numel(), dtype=dtype) for n, p in self.parameters.items()}
        names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        checked = ExchangeSettings(
            codec, min_compress_numel=0, state_update=state_update, **settings
        )
        self.reducer = Reducer(names, settings=checked, network=network)
        self.buckets = DDPBuckets(self.reducer)

    def begin(self, given: Tensors, buckets: int | None = None) -> list[Future[Tensor]]:
        """Hand over all buckets of a step, or the first ``buckets``, each in its ``flats``."""
        last, futures = len(self.parameters) - 1, []
        for number, (name, parameter) in enumerate([*self.parameters.items()][:buckets]):
            flat = self.flats[name].copy_(given[name].flatten())
            bucket = FakeBucket(flat, [parameter], number, last=number == last)
            futures.append(self.buckets.reduce(bucket))
        return futures

    def step(self, rank: int, step: int) -> list[Tensor]:
        return [future.wait() for future in self.begin(feed(rank, step, self._shapes, self._dtype))]


def among(rank: Rank, members: list[int], name: str, *, per_host: int = 1) -> Network:
    """A network of ``members``; each of them asks for it.

    It is hierarchical where ``per_host`` ranks of the world share a node, and there are two levels.
    """
    limit = WaitLimit()
    data, control = (
        Channel(rank.group(f"{name} {which}", members), limit=limit)
        for which in ("data", "control")
    )
    nodes = tuple(f"node{m // per_host}" for m in members)
    topology = Topology(nodes, members.index(rank.rank))
    flat, tree = Network(data, control, topology, torch.device("cpu")), topology.by_node()
    if not 1 < len(tree) < len(members):
        return flat

    def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
        return rank.group(f"{name} level", [members[each] for each in ranks])

    return in_levels(flat, tree, leader=False, new_group=new_group)


@dataclass
class Counting:
    """A watch that notes every collective: the name of its channel, and its bytes."""

    found: list[tuple[str, int]] = field(default_factory=list)

    def launches(self, op: str, *, group: str, sent: int) -> None:
        self.found.append((group, sent))

    def waits(self) -> Callable[[], None]:
        return lambda: None
