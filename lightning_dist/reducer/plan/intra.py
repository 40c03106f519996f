"""The way of tensors inside a host: what travels together there, and who owns which part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.exchange.wire import PayloadMemory
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.shares import Cut, fragments, shares_of, units_of_shares
from lightning_dist.reducer.units.sizes import WHOLE_BUCKET, unit_elements

if TYPE_CHECKING:
    from lightning_dist.reducer.plan.planner import Planner


class IntraPlan:
    """Common state of hierarchical units.

    Args:
        network: whose ranks reduce in its ``intra`` level first.
        codec: inside the host, ``none`` or a cast.
        inter: plans what goes on between hosts; None on ranks that leave that to others.
        whole: names of the parameters that some codec needs as they are.
    """

    def __init__(
        self, network: Network, codec: BlockCodec, inter: Planner | None, *, whole: Collection[str]
    ) -> None:
        assert network.intra is not None
        self.intra, self.inter, self.codec, self._whole = network.intra, inter, codec, whole
        self.memory = PayloadMemory(network.device)  # units take turns with it
        self._most = unit_elements(network.rows.count, whole=network.whole_buckets)

    @property
    def whole_buckets(self) -> bool:
        """Whether units are whole buckets, which share their exchange."""
        return self._most == WHOLE_BUCKET

    @property
    def padded(self) -> bool:
        """Whether all shares travel as the largest: a single collective brings them back."""
        return self.whole_buckets and self.intra.level.owners == self.intra.topology.world_size

    def lengths(self, part: ParameterSlice) -> list[int]:
        """Elements of the shares of ``part``."""
        owners = self.intra.level.owners
        if owners == 1 or part.name in self._whole:
            return [part.numel]
        found = fragments(part.name, part.numel, owners=owners, most=self._most, whole=False)
        return [end - start for cut in found for start, end in cut if end > start]

    def cuts(
        self, codec: Codec, slices: Sequence[ParameterSlice], *, keeps: bool
    ) -> Iterator[Sequence[Cut]]:
        """Parts that are exchanged together, and their owners.

        Args:
            keeps: whether ranks have state of each parameter.
        """
        return units_of_shares(
            slices,
            level=self.intra.level,
            most=self._most,
            whole=self._whole,
            separate=keeps or not codec.elementwise,
            together=codec.whole_tensors,
        )

    def held(
        self, codec: Codec, part: ParameterSlice, dtype: torch.dtype
    ) -> Iterator[ParameterSlice]:
        """Sections of ``part`` of which this rank has the state."""
        if self.inter is not None:
            for cuts in self.cuts(codec, [part], keeps=True):
                for share in shares_of(cuts, self.intra.topology.rank):
                    yield from self.inter.held(codec, share, share_dtype(codec, dtype))


def share_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Wide, so that the codec alone rounds the mean of a host; without one, what is sent anyway."""
    return dtype if codec.lossless else compute_dtype(dtype)
