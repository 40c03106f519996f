"""The way of tensors inside a host: what travels together there, and who owns which part of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING
from weakref import proxy

import torch

from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.memory import NoMemory
from lightning_dist.codecs.none import NoCompression
from lightning_dist.exchange.wire import PayloadMemory, row_bytes
from lightning_dist.kernels.passes import Factors, Kernels, compute_dtype
from lightning_dist.kernels.triton import SliceTable, kernels_of
from lightning_dist.kernels.triton.table import Slice
from lightning_dist.reducer.network import IntraLevel
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import JoinedUnit, join
from lightning_dist.reducer.units.shares import Cut, fragments, shares_of, units_of_shares
from lightning_dist.reducer.units.sizes import WHOLE_BUCKET, unit_elements

if TYPE_CHECKING:
    from lightning_dist.kernels.triton.passes import TableKernels
    from lightning_dist.reducer.plan.planner import Planner


@dataclass(frozen=True)
class IntraKernels:
    """The two ways inside a host. Nothing is kept of what their codec rounds.

    ``up``: gradients -> mean of the host, weighted. ``down``: mean of all hosts -> gradients.
    """

    up: Kernels
    down: Kernels
    tables: TableKernels | None  # of an accelerator, of both ways


class IntraPlan:
    """What hierarchical units have in common.

    Args:
        planner: of the network whose ranks reduce in ``intra`` first.
        codec: inside the host.
        inter: plans what goes on between hosts; None on ranks that leave that to others.
        nested: this is an outer level of several.
    """

    def __init__(
        self,
        planner: Planner,
        intra: IntraLevel,
        codec: BlockCodec,
        inter: Planner | None,
        *,
        nested: bool,
    ) -> None:
        self.intra, self.inter, self._codec = intra, inter, codec
        self._planner = proxy(planner)  # which has this; a cycle would keep the network's groups
        self._nested = nested
        network = planner.network
        self.memory = PayloadMemory(network.device)  # units take turns with it
        self._most = unit_elements(network.rows.count, whole=network.whole_buckets)
        self._kernels: dict[tuple[BlockCodec, torch.dtype], IntraKernels] = {}

    def joined(self, unit: JoinedUnit) -> JoinedUnit:
        """``unit`` with its exchange, which it shares where whole buckets travel.

        On the innermost level: units of outer ones go on one after the other.
        """
        if self._most == WHOLE_BUCKET and not self._nested:
            return self._planner.joined(unit)
        join([unit])
        return unit

    @property
    def padded(self) -> bool:
        """Whether all shares travel as the largest: a single collective brings them back."""
        every = self.intra.level.owners == self.intra.topology.world_size
        return every and self._most == WHOLE_BUCKET

    def lengths(self, part: ParameterSlice, *, beyond: int = 1) -> list[int]:
        """Elements of the shares of ``part``, each cut among so many ranks of outer levels."""
        parts = self.intra.level.owners * beyond
        if parts == 1 or part.name in self._planner.whole:
            return [part.numel]
        found = fragments(part.name, part.numel, owners=parts, most=self._most, whole=False)
        return [end - start for cut in found for start, end in cut if end > start]

    def codecs_of(
        self, slices: Sequence[ParameterSlice], dtype: torch.dtype
    ) -> dict[BlockCodec, list[ParameterSlice]]:
        """``slices`` by their codec inside the host: none where blocks were mostly padding."""
        found: dict[BlockCodec, list[ParameterSlice]] = {}
        planes, block = self._codec.planes(dtype), self._codec.block
        for part in slices:
            sent = sum(row_bytes(planes, -(-numel // block)) for numel in self.lengths(part))
            more = sent > part.numel * dtype.itemsize
            found.setdefault(NoCompression() if more else self._codec, []).append(part)
        return found

    def cuts(
        self, codec: Codec, slices: Sequence[ParameterSlice], intra_codec: BlockCodec
    ) -> Iterator[Sequence[Cut]]:
        """What travels together, and who owns which part of it."""
        elementwise = codec.elementwise and intra_codec.elementwise
        return units_of_shares(
            slices,
            level=self.intra.level,
            most=self._most,
            whole=self._planner.whole,
            separate=bool(self._planner.kinds(codec)) or not elementwise,
            together=codec.whole_tensors,
        )

    def held(
        self, codec: Codec, part: ParameterSlice, dtype: torch.dtype
    ) -> Iterator[ParameterSlice]:
        """What this rank is responsible for of ``part``."""
        if self.inter is not None:
            for cuts in self.cuts(codec, [part], self._codec):
                for share in shares_of(cuts, self.intra.topology.rank):
                    yield from self.inter.held(codec, share, share_dtype(codec, dtype))

    def kernels(self, codec: BlockCodec, dtype: torch.dtype) -> IntraKernels:
        """Kernels of ``codec`` for gradients of ``dtype``."""
        if (codec, dtype) not in self._kernels:
            ranks = self.intra.topology.world_size
            up, down = (
                Kernels(codec, memory=NoMemory(), factors=Factors(mean=weight), world_size=ranks)
                for weight in (self.intra.level.weight, 1.0)
            )
            tables = kernels_of(codec, dtype=dtype) if self._planner.tables else None
            self._kernels[codec, dtype] = IntraKernels(up, down, tables)
        return self._kernels[codec, dtype]

    def compile(
        self, codec: Codec, dtypes: Collection[torch.dtype], sizes: Collection[int]
    ) -> None:
        """Compile the kernels for gradients of ``dtypes``; see :meth:`.Planner.fuse`."""
        planner, ranks = self._planner, self.intra.topology.world_size
        for dtype, inside in product(dtypes, dict.fromkeys((self._codec, NoCompression()))):
            kernels = self.kernels(inside, dtype)
            if planner.on_accelerator:
                self._compile_tables(kernels, dtype, share_dtype(codec, dtype))
            # A share is wider than 16-bit gradients, and a fused pass is for one of the two.
            elif compute_dtype(dtype) == dtype:
                planner.fuse_kernels(kernels.up, dtype, received=ranks)
                planner.fuse_kernels(kernels.down, dtype)
        if self.inter is not None:
            parts = [ParameterSlice("", 0, (numel,)) for numel in sizes]
            shares = {share for part in parts for share in self.lengths(part)}
            self.inter.fuse(codec, {share_dtype(codec, each) for each in dtypes}, sizes=shares)

    def _compile_tables(self, kernels: IntraKernels, dtype: torch.dtype, wide: torch.dtype) -> None:
        if kernels.tables is None:
            return
        codec, device, ranks = kernels.up.codec, self.memory.device, self.intra.topology.world_size
        one = torch.ones((), device=device)
        tables, whole = kernels.tables.compiling(), math.lcm(16, codec.block)
        ways = ((dtype, 1, 1.0), (wide, ranks, kernels.up.passes.factors.mean))
        # As tables between hosts; payloads begin at multiples of 8 bytes.
        for numel, start, way in product((whole, whole - 1), (0, 8), ways):
            flat_dtype, count, weight = way
            table = SliceTable.of(codec, [[Slice("", 0, numel)]], device=device, dtype=dtype)
            flat, size = torch.zeros(numel, dtype=flat_dtype, device=device), table.payload_bytes
            payloads = torch.zeros(start + count * size, dtype=torch.uint8, device=device)[start:]
            tables.encode(flat, None, one, table=table, payload=payloads[:size])
            tables.decode(payloads, flat, table=table, weight=weight)


def share_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Wide, so that the codec alone rounds the mean of a host; without one, what is sent anyway."""
    return dtype if codec.lossless else compute_dtype(dtype)
