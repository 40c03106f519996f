"""The way of a bucket through the threshold codec: as many elements as are large enough."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.threshold import Threshold
from lightning_dist.exchange.rounds import AllGatherV
from lightning_dist.kernels.inductor import compiled_sparse_passes
from lightning_dist.kernels.passes import EAGER, MOST_PLACES, compute_dtype
from lightning_dist.reducer.plan.flat import FlatPlanner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import CommUnit
from lightning_dist.reducer.units.by_codec import compile_passes, units_of


class SparseUnit(CommUnit):
    """All parameters of one bucket that the codec compresses. Indices count from its start."""

    exchange: AllGatherV

    def __init__(
        self,
        codec: Threshold,
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        planner: FlatPlanner,
    ) -> None:
        if bucket.numel() > MOST_PLACES:
            raise ValueError(
                f"codec 'threshold' sends places in a bucket as int32, got {bucket.numel()} "
                f"elements for at most {MOST_PLACES}; use 'topk' for the largest parameters"
            )
        self._codec, self._slices, self._bucket = codec, slices, bucket
        network, compiled = planner.network, planner.sparse_passes
        self.exchange = AllGatherV(**network.where())
        self._share = 1.0 / network.world_size
        dtype = compute_dtype(bucket.dtype)
        self._residuals = [
            planner.state.per_rank("residual", part, dtype=dtype, device=bucket.device)
            for part in (slices if planner.memory_of(codec).kinds else ())
        ]
        # Compiled passes are of float32.
        self._passes = {**EAGER, **(compiled if dtype == torch.float32 else {})}
        same = dtype == bucket.dtype
        self._compensated = bucket if same else torch.zeros_like(bucket, dtype=dtype)

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        chosen = []
        for part, residual in zip_longest(self._slices, self._residuals):
            compensated = part.of(self._compensated)
            if self._compensated is not self._bucket:
                compensated.copy_(part.of(self._bucket))
            select = self._passes["select"]
            chosen.append(select(self._codec, compensated, residual, scale, part.offset))
        places, values = zip(*chosen, strict=True)
        self.exchange.own = torch.cat(places), torch.cat(values)

    @override
    def finite(self) -> Tensor:
        return self.exchange.own[1].isfinite().all()

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        if self._residuals:
            self._passes["scatter"](self._compensated, self.exchange.own, -1.0)
        for part, residual in zip_longest(self._slices, self._residuals):
            self._passes["keep"](part.of(self._compensated), residual, scale)
        # In rank order: within one payload places are distinct.
        for payload in self.exchange.payloads:
            self._passes["scatter"](self._compensated, payload, self._share)
        if self._compensated is not self._bucket:
            for part in self._slices:
                part.of(self._bucket).copy_(part.of(self._compensated))
        self.exchange.release()

    @property
    @override
    def nbytes(self) -> int:
        # Payloads are made anew for every step.
        return self._compensated.nbytes if self._compensated is not self._bucket else 0


@units_of.register(Threshold)
def _units(
    codec: Threshold, slices: Sequence[ParameterSlice], bucket: Tensor, planner: FlatPlanner
) -> list[SparseUnit]:
    return [SparseUnit(codec, slices, bucket, planner)]


@compile_passes.register(Threshold)
def _compile(
    codec: Threshold, dtypes: Iterable[torch.dtype], planner: FlatPlanner, sizes: Collection[int]
) -> None:
    planner.sparse_passes = compiled_sparse_passes(planner.network.device)
