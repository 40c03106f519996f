"""A codec that is not one of blocks, with a communication unit of its own: one scale per tensor."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from feeding import SHAPES, Fed, compressed
from layouts import PAIRS, Layout, flat
from saving import lost, totals
from threads import of_all, on_threads
from torch import Tensor
from typing_extensions import override
from worlds import Rank, run_threads

from lightning_dist.codecs import Codec
from lightning_dist.codecs.base import Shape
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.plan.flat import FlatPlanner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import CommUnit
from lightning_dist.reducer.units.by_codec import require_units, units_of
from lightning_dist.sync.ddp import compress_ddp


@dataclass(frozen=True)
class PerTensor(Codec):
    """One byte per element, and one scale per tensor."""

    name: ClassVar[str] = "per_tensor"
    exchange: ClassVar[str] = "gather"
    keeps_residual: ClassVar[bool] = True
    whole_tensors: ClassVar[bool] = True


@dataclass(frozen=True)
class WithoutUnits(Codec):
    name: ClassVar[str] = "without_units"
    exchange: ClassVar[str] = "gather"


class PerTensorUnit(CommUnit):
    """Scales, then codes, of all parameters of a bucket."""

    seen: ClassVar[set[tuple[str, Shape]]] = set()

    def __init__(
        self,
        codec: PerTensor,
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        planner: FlatPlanner,
    ) -> None:
        self.seen.update((part.name, part.shape) for part in slices)
        self.slices, self.network = slices, planner.network
        self.grads = [part.of(bucket) for part in slices]
        self.residuals = [
            planner.state.per_rank("residual", part, dtype=bucket.dtype, device=bucket.device)
            for part in slices
        ]
        size = sum(8 + part.numel for part in slices)
        self.own = torch.zeros(size, dtype=torch.uint8)
        self.received = torch.zeros(self.network.world_size * size, dtype=torch.uint8)

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        parts = []
        for grad, residual in zip(self.grads, self.residuals, strict=True):
            grad.add_(residual * scale)
            unit = (grad.abs().amax().double() / 127).clamp_min(1e-300)
            parts += [unit.view(1), (grad / unit).round().to(torch.int8)]
        self.own.copy_(torch.cat([part.view(torch.uint8) for part in parts]))

    @override
    def finite(self) -> Tensor:
        return torch.stack([grad.isfinite().all() for grad in self.grads]).all()

    @override
    def start(self) -> None:
        self.work = self.network.data.all_gather(self.received, self.own)

    @override
    def start_second(self) -> None:
        pass

    @override
    def wait(self) -> None:
        self.work.wait()

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        for grad, residual, sent in zip(
            self.grads, self.residuals, self._decoded(self.own), strict=True
        ):
            residual.copy_((grad - sent) / scale)
            grad.zero_()
        for payload in self.received.chunk(self.network.world_size):
            for grad, sent in zip(self.grads, self._decoded(payload), strict=True):
                grad.add_(sent / self.network.world_size)

    def _decoded(self, payload: Tensor) -> Iterator[Tensor]:
        sizes = [size for part in self.slices for size in (8, part.numel)]
        parts = payload.split(sizes)
        for unit, codes in zip(parts[::2], parts[1::2], strict=True):
            yield codes.view(torch.int8) * unit.clone().view(torch.float64)

    @property
    @override
    def sent(self) -> Sent:
        return Sent(intra=0, inter=self.own.nbytes)

    @property
    @override
    def nbytes(self) -> int:
        return self.own.nbytes + self.received.nbytes


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    @units_of.register(PerTensor)
    def _(
        codec: PerTensor, slices: Sequence[ParameterSlice], bucket: Tensor, planner: FlatPlanner
    ) -> Sequence[CommUnit]:
        return [PerTensorUnit(codec, slices, bucket, planner)]


@pytest.mark.parametrize("layout", [flat(2), flat(3), Layout(PAIRS)], ids=str)
@on_threads("layout")
def test_it_conserves_mass_and_sees_whole_tensors(rank: Rank, layout: Layout) -> None:
    PerTensorUnit.seen.clear()
    rank.barrier.wait()
    ranks = of_all(rank, totals(rank, PerTensor(), 20, layout=layout, min_compress_numel=0))
    assert lost(ranks) < 1e-10
    assert len({str(each.digests) for each in ranks}) == 1
    assert any(each.norms[-1] for each in ranks)
    assert {(name, shape) for name, shape in SHAPES.items()} == PerTensorUnit.seen


def test_units_must_be_there() -> None:
    """Without one a gradient stays that of its rank, and replicas drift apart."""

    @dataclass(frozen=True)
    class Nowhere(PerTensor):
        name: ClassVar[str] = "nowhere"

    units_of.register(Nowhere, lambda *arguments: [])

    def body(rank: Rank) -> None:
        refused = pytest.raises(ValueError, match=r"units_of.*'nowhere'.* at least one")
        plans = rank.rank == 0  # to say what a step will send
        with refused if plans else nullcontext():
            compress_ddp(rank.ddp(Fed()), Nowhere(), groups=rank.groups(), min_compress_numel=0)

    run_threads(body, 2)


def test_a_codec_without_units_is_refused_at_the_start() -> None:
    def body(rank: Rank) -> None:
        with (
            pytest.raises(ValueError, match="or have communication units of its own, got without"),
            compressed(rank, Fed(), WithoutUnits()),
        ):
            pass

    run_threads(body, 2)
    require_units(PerTensor())
