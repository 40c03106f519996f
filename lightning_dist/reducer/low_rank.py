"""The way of a bucket's matrices through PowerSGD: one allreduce, or two in the paper's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.powersgd import PowerSGD, matrix_shape, orthonormal
from lightning_dist.codecs.precision import full_precision
from lightning_dist.exchange.traffic import Sent, ring_allreduce
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.unit import CommUnit
from lightning_dist.reducer.units import units_of

if TYPE_CHECKING:
    from lightning_dist.reducer.plan import Planner

_Product: TypeAlias = tuple[Tensor, Tensor]  # (n, r) and (m, r): left @ right.T


class _Sum:
    """One flat buffer of all matrices' factors of one side, added by the network."""

    def __init__(self, sizes: Sequence[tuple[int, int]], network: Network, like: Tensor) -> None:
        self._network = network
        total = sum(rows * rank for rows, rank in sizes)
        self.own, self.mean = like.new_zeros(total), like.new_zeros(total)
        self.owns, self.means = _views(self.own, sizes), _views(self.mean, sizes)

    def start(self) -> None:
        torch.mul(self.own, 1.0 / self._network.world_size, out=self.mean)
        self._work = self._network.data.all_reduce(self.mean)

    def wait(self) -> None:
        self._work.wait()

    @property
    def sent(self) -> Sent:
        return ring_allreduce(self.mean.nbytes, self._network.topology)


@dataclass
class _Matrix:
    """One parameter: views of bucket, state and buffers.

    ``shaped`` is ``(n, m)`` where the bucket can be viewed so, otherwise the parameter's shape: a
    channels_last one is copied to be a matrix of the same elements as a contiguous one.
    """

    gradient: Tensor  # shaped, of the bucket
    compensated: (
        Tensor  # (n, m), gradient + residual: the bucket's own memory where that is possible
    )
    residual: Tensor | None  # shaped
    left: Tensor  # (n, r) orthonormal, equal on all ranks
    right: Tensor  # (m, r)

    @property
    def shaped(self) -> Tensor:
        """``compensated``, as gradient and residual are."""
        copied = self.gradient.shape != self.compensated.shape
        return self.compensated.view(self.gradient.shape) if copied else self.compensated


class LowRankUnit(CommUnit):
    """All matrices of one bucket."""

    def __init__(
        self,
        codec: PowerSGD,
        *,
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        network: Network,
        state: ReducerState,
        error_feedback: bool,
    ) -> None:
        self._codec = codec
        like = bucket.new_empty(0, dtype=compute_dtype(bucket.dtype))
        self._matrices = [_matrix(codec, part, bucket, state, error_feedback) for part in slices]
        shapes = [matrix_shape(part.shape) for part in slices]
        self._p = _Sum([(n, codec.rank) for n, _ in shapes], network, like)
        self._q = _Sum([(m, codec.rank) for _, m in shapes], network, like)
        self._sums: list[_Sum] = []  # those in use at this step, in order

    @override
    @full_precision()
    def encode(self, scale: Tensor, *, step: int) -> None:
        both = [self._p, self._q]
        self._sums = both if self._codec.two_phase else [both[step % 2]]
        for matrix, p, q in zip(self._matrices, self._p.owns, self._q.owns, strict=True):
            if matrix.compensated is not matrix.gradient:
                matrix.shaped.copy_(matrix.gradient)
            if matrix.residual is not None:
                matrix.shaped.addcmul_(matrix.residual, scale)
            if self._sums[0] is self._p:
                torch.mm(matrix.compensated, matrix.right, out=p)
            else:
                torch.mm(matrix.compensated.T, matrix.left, out=q)

    @override
    def finite(self) -> Tensor:
        return self._sums[0].own.isfinite().all()

    @override
    def start(self) -> None:
        self._sums[0].start()

    @override
    def start_second(self) -> None:
        if not self._codec.two_phase:
            return
        self._p.wait()
        with full_precision():  # not while it waits: other reducers would wait for the setting
            for matrix, p, q in zip(self._matrices, self._p.means, self._q.owns, strict=True):
                # Orthonormal columns hide an inf that the sum still shows.
                p.copy_(torch.where(p.isfinite().all(), orthonormal(p), torch.nan))
                torch.mm(matrix.compensated.T, p, out=q)
        self._q.start()

    @override
    def wait(self) -> None:
        self._sums[-1].wait()

    @override
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        for i, matrix in enumerate(self._matrices):
            rows, width = matrix.compensated.shape
            at = sampler.items(rows, of=width, device=matrix.compensated.device)
            if not len(at):
                continue
            compensated, residual = matrix.compensated[at], None
            gradient = matrix.gradient[at].to(compensated.dtype)
            if matrix.residual is not None:
                if matrix.compensated is matrix.gradient:
                    gradient = compensated - matrix.residual[at] * scale
                residual = partial(_rows, matrix.residual, at)
            sent = partial(self._said, i, at)
            yield CodecSample(gradient.flatten(), compensated.flatten(), sent, residual)

    def _said(self, i: int, at: Tensor) -> Tensor:
        """Rows ``at`` of what was sent for matrix ``i``: in the two-phase form not known before."""
        (left, right), _ = self._products(i)
        return (left[at] @ right.T).flatten()

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        self._decode_and_commit(scale)

    @full_precision()
    def _decode_and_commit(self, scale: Tensor) -> None:
        products = [self._products(i) for i in range(len(self._matrices))]
        # Waits for a GPU once. What is not finite shows in a factor, which is small: to look there
        # saves a pass over every residual.
        factors = [torch.cat([f.flatten() for f in both]) for pair in products for both in pair]
        finite = torch.stack([factor.isfinite().all() for factor in factors])
        factor, *known = torch.cat([scale.view(1), finite.to(scale.dtype)]).tolist()
        share = 1.0 / factor
        for i, (matrix, (own, mean)) in enumerate(zip(self._matrices, products, strict=True)):
            own_is_finite, mean_is_finite = known[2 * i : 2 * i + 2]
            if matrix.residual is not None and own_is_finite:
                left, right = own
                same = matrix.residual.shape == matrix.compensated.shape
                lost = matrix.residual if same else matrix.compensated
                torch.addmm(matrix.compensated, left, right.T, beta=share, alpha=-share, out=lost)
                if not same:
                    matrix.residual.copy_(matrix.shaped)
            torch.mm(mean[0], mean[1].T, out=matrix.compensated)
            if matrix.compensated is not matrix.gradient:
                matrix.gradient.copy_(matrix.shaped)
            if mean_is_finite:
                self._start_next_from(matrix, i)

    def _products(self, i: int) -> tuple[_Product, _Product]:
        """Own and mean approximation of matrix ``i``."""
        matrix = self._matrices[i]
        if self._codec.two_phase:
            left = self._p.means[i]
            return (left, self._q.owns[i]), (left, self._q.means[i])
        if self._sums[0] is self._p:
            return (self._p.owns[i], matrix.right), (self._p.means[i], matrix.right)
        return (matrix.left, self._q.owns[i]), (matrix.left, self._q.means[i])

    def _start_next_from(self, matrix: _Matrix, i: int) -> None:
        if self._codec.two_phase:
            matrix.right.copy_(orthonormal(self._q.means[i]))  # only its span matters to the next
        elif self._sums[0] is self._p:
            matrix.left.copy_(orthonormal(self._p.means[i]))
        else:
            matrix.right.copy_(orthonormal(self._q.means[i]))

    @property
    @override
    def sent(self) -> Sent:
        """Bytes of the step; before the first one, of the mean of two."""
        if self._sums or self._codec.two_phase:
            return sum((part.sent for part in self._sums or [self._p, self._q]), Sent())
        both = self._p.sent + self._q.sent
        return Sent(both.intra // 2, both.inter // 2)

    @property
    @override
    def nbytes(self) -> int:
        copies = (m.compensated.nbytes for m in self._matrices if m.compensated is not m.gradient)
        return 2 * (self._p.own.nbytes + self._q.own.nbytes) + sum(copies)


@units_of.register(PowerSGD)
def _units(
    codec: PowerSGD, slices: Sequence[ParameterSlice], bucket: Tensor, planner: Planner
) -> list[LowRankUnit]:
    unit = LowRankUnit(
        codec,
        slices=slices,
        bucket=bucket,
        network=planner.network,
        state=planner.state,
        error_feedback=bool(codec.memory(planner.error_feedback).kinds),
    )
    return [unit]


def _matrix(
    codec: PowerSGD, part: ParameterSlice, bucket: Tensor, state: ReducerState, error_feedback: bool
) -> _Matrix:
    size = matrix_shape(part.shape)
    dtype = compute_dtype(bucket.dtype)
    gradient = part.shaped(part.of(bucket))
    try:
        gradient = gradient.view(size)
        compensated = gradient if dtype == bucket.dtype else gradient.to(dtype)
    except RuntimeError:  # the bucket cannot be viewed as a matrix
        compensated = gradient.reshape(size).to(dtype)
    left, right = state.low_rank(codec, part, dtype=dtype, device=bucket.device)
    residual = None
    if error_feedback:
        flat = state.per_rank("residual", part, dtype=dtype, device=bucket.device)
        residual = part.shaped(flat).view(gradient.shape)
    return _Matrix(gradient, compensated, residual, left, right)


def _rows(matrix: Tensor, at: Tensor) -> Tensor:
    return matrix[at].flatten()


def _views(flat: Tensor, sizes: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    parts = torch.split_with_sizes(flat, [rows * rank for rows, rank in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
