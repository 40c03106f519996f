"""Block codecs, compiled passes and memory that the units of a flat network share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.memory import Memory
from lightning_dist.exchange.rounds import PayloadMemory
from lightning_dist.kernels.inductor import Variant, fused_passes, known_passes
from lightning_dist.kernels.passes import Factors, Kernels, Pass
from lightning_dist.kernels.triton import available_on, kernels_of
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.block import BlockPlan
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units.base import JoinedUnit, join


class FlatPlanner:
    """Owns one plan, with its kernels, per block codec and dtype.

    Args:
        immediate: block codecs write their state when they encode, and tensors take turns with the
            memory of payloads.
        tables: use Triton's kernels over tables of slices where the device has them.
        divide_last: uncompressed gradients are added and then divided, as torch's HSDP does; else
            divided and then added, as DDP does.
    """

    def __init__(
        self,
        network: Network,
        state: ReducerState,
        *,
        memory_of: Callable[[Codec], Memory],
        immediate: bool = False,
        tables: bool = True,
        divide_last: bool = False,
    ) -> None:
        self.network, self.state, self._divide_last = network, state, divide_last
        self.memory_of = memory_of
        self._blocks: dict[tuple[BlockCodec, torch.dtype], BlockPlan] = {}
        self.sparse_passes: Mapping[str, Pass] = {}  # compiled
        self._compiles = True
        self._to_join: list[JoinedUnit] = []  # of the tensor that is planned
        self._tables = tables and available_on(network.device)
        self._payloads = PayloadMemory(network.device) if immediate else None

    def kinds(self, codec: Codec) -> Sequence[str]:
        """Kinds of state that differ from rank to rank, under ``codec`` and the user's settings."""
        return self.memory_of(codec).kinds

    def restart(self, turn: int) -> None:
        """A tensor is planned. Those of one ``turn`` share memory."""
        if self._payloads is not None:
            self._payloads.restart(turn)

    def joined(self, unit: JoinedUnit) -> JoinedUnit:
        """``unit``, which travels with the others of its tensor that are joined."""
        self._to_join.append(unit)
        return unit

    def join(self) -> None:
        """All units of the tensor are planned."""
        units, self._to_join = self._to_join, []
        if units:
            join(units)

    def free(self) -> None:
        """Memory of payloads: what is planned from now on has new ones."""
        if self._payloads is not None:
            self._payloads.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that units share."""
        return 0 if self._payloads is None else self._payloads.nbytes

    def compile_no_more(self) -> None:
        """Use kernels only that this process has compiled before: all have the same bytes."""
        self._compiles = False

    @property
    def is_fused(self) -> bool:
        """True if any kernels are compiled."""
        return bool(self.sparse_passes) or any(
            plan.kernels.is_fused for plan in self._blocks.values()
        )

    def fuse_kernels(self, plan: BlockPlan) -> None:
        """Compile the kernels of ``plan``, if their codec can be compiled."""
        if plan.codec.fusable and not plan.codec.lossless:
            passes, device = plan.kernels.passes, plan.network.device
            received = plan.kind.received(plan.network.world_size)
            variant = Variant(passes, plan.dtype, plan.rows, received, device, plan.immediate)
            plan.kernels.use(fused_passes(variant) if self._compiles else known_passes(variant))

    def _factors(self, codec: BlockCodec) -> Factors:
        """Factors by which a flat exchange makes a mean of the sum over ranks."""
        world = self.network.world_size
        kind = EXCHANGES[codec.exchange].among(world)
        if kind.reduced_by == "owners":
            return Factors()
        if kind.reduced_by == "everyone":
            return Factors(mean=1.0 / world)
        if self._divide_last and codec.lossless:  # the bits of torch's HSDP
            return Factors(divisor=float(world))
        return Factors(encode=1.0 / world, own=float(world))

    def blocks(self, codec: BlockCodec, dtype: torch.dtype) -> BlockPlan:
        """A block codec for gradients of ``dtype`` in a flat exchange."""
        if (codec, dtype) not in self._blocks:
            memory, factors = self.memory_of(codec), self._factors(codec)
            world, state = self.network.world_size, self.state
            kernels = Kernels(codec, memory=memory, factors=factors, world_size=world)
            by_owners = EXCHANGES[codec.exchange].reduced_by == "owners"
            in_tables = self._tables and by_owners and memory.in_tables
            tables = kernels_of(codec, dtype=dtype) if in_tables else None
            plan = BlockPlan(codec, dtype, kernels, self.network, state, self._payloads, tables)
            self._blocks[codec, dtype] = plan
        return self._blocks[codec, dtype]
