"""A reducer with two buckets, fed by a test, and networks of some ranks of a world."""

from __future__ import annotations

from typing import Literal

import torch
from feeding import FakeBucket, Shapes, Tensors, feed
from torch import Tensor
from worlds import Rank

from lightning_dist.codecs import Codec
from lightning_dist.exchange.channel import Channel
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.reducer.network import Network
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


def among(rank: Rank, members: list[int], name: str) -> Network:
    """A flat network of ``members``; each of them asks for it."""
    channels = [Channel(rank.group(f"{name} {which}", members)) for which in ("data", "control")]
    topology = Topology(tuple(f"host{m}" for m in members), members.index(rank.rank))
    return Network(channels[0], channels[1], topology, torch.device("cpu"))
