"""The way of a bucket's matrices through PowerSGD: one allreduce, or two in the paper's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.private import copy_all
from lightning_dist.codecs.base import Plane
from lightning_dist.codecs.powersgd import PowerSGD, matrix_shape, orthonormal
from lightning_dist.codecs.scales import full_precision
from lightning_dist.exchange.rounds import AllReduce
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.ranks.traffic import Sent, ring_allreduce
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.flat import FlatPlanner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import CommUnit
from lightning_dist.reducer.units.by_codec import units_of

_Product: TypeAlias = tuple[Tensor, Tensor]  # (n, r) and (m, r): left @ right.T


class _Factors:
    """One factor of every matrix, ``(n, r)`` or ``(m, r)``, in one allreduce.

    Args:
        shapes: ``(n, m)`` of every matrix.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], rank: int, network: Network, like: Tensor
    ) -> None:
        self._shapes, self._rank, self._network, self._dtype = shapes, rank, network, like.dtype
        largest = rank * sum(map(max, shapes))
        self._memory = [like.new_zeros(largest).view(torch.uint8) for _ in ("own", "mean")]
        self.use([0] * len(shapes))

    def use(self, sides: Sequence[int]) -> None:
        """Exchange, at this step, the factors with the rows (0) or the columns (1) of matrices."""
        sizes = [(shape[side], self._rank) for shape, side in zip(self._shapes, sides, strict=True)]
        memory = iter(self._memory)
        self.exchange = AllReduce(
            [Plane(self._dtype, 1)],
            sum(rows * rank for rows, rank in sizes),
            keep_own=True,
            weight=1.0 / self._network.world_size,
            **self._network.where(lambda nbytes: next(memory)[:nbytes]),
        )
        (own,), ((mean,),) = self.exchange.whole.own, self.exchange.whole.payloads
        self.owns, self.means = _views(own, sizes), _views(mean, sizes)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)


@dataclass
class _Matrix:
    """One parameter: views of bucket, state and buffers.

    ``shaped`` is ``(n, m)`` where the bucket can be viewed so, otherwise the parameter's shape: a
    channels_last one is copied to be a matrix of the same elements as a contiguous one.
    """

    gradient: Tensor  # shaped, of the bucket
    compensated: Tensor  # (n, m), gradient + residual: in the bucket where that is possible
    residual: Tensor | None  # shaped
    left: Tensor  # (n, r) orthonormal, equal on all ranks
    right: Tensor  # (m, r)
    turn: Tensor  # 0-d: the side of the next exchange

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
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        planner: FlatPlanner,
    ) -> None:
        self._codec, network = codec, planner.network
        like = bucket.new_empty(0, dtype=compute_dtype(bucket.dtype))
        self._matrices = [_matrix(codec, part, bucket, planner) for part in slices]
        shapes = [matrix_shape(part.shape) for part in slices]
        sums = [_Factors(shapes, codec.rank, network, like) for _ in range(1 + codec.two_phase)]
        self._first, self._last = sums[0], sums[-1]  # exchanges of a step
        self._sides: Sequence[int] = ()  # of the last of them
        nbytes = like.itemsize * codec.rank * sum(map(sum, shapes))
        expected = ring_allreduce(nbytes, network.topology)
        self._sent = expected if codec.two_phase else Sent(expected.intra // 2, expected.inter // 2)

    @override
    @full_precision()
    def encode(self, scale: Tensor, *, step: int) -> None:
        for matrix in self._matrices:
            if matrix.compensated is not matrix.gradient:
                matrix.shaped.copy_(matrix.gradient)
            if matrix.residual is not None:
                matrix.shaped.addcmul_(matrix.residual, scale)
        self._sides = [0 if self._codec.two_phase else int(m.turn) for m in self._matrices]
        self._multiply(self._first, [matrix.left for matrix in self._matrices])

    def _multiply(self, factors: _Factors, lefts: Sequence[Tensor]) -> None:
        factors.use(self._sides)
        rest = self._sides, self._matrices, lefts
        for own, side, matrix, left in zip(factors.owns, *rest, strict=True):
            if side:
                torch.mm(matrix.compensated.T, left, out=own)
            else:
                torch.mm(matrix.compensated, matrix.right, out=own)

    @override
    def finite(self) -> Tensor:
        return self._first.exchange.whole.own[0].isfinite().all()

    @override
    def start(self) -> None:
        self._first.exchange.start()

    @override
    def start_second(self) -> None:
        if not self._codec.two_phase:
            return
        self._first.exchange.wait()
        with full_precision():  # not while it waits: other reducers would wait for the setting
            for numbers in _of_equal_shape(self._first.means, range(len(self._matrices))):
                ps = [self._first.means[i] for i in numbers]
                # Orthonormal columns hide an inf that the sum still shows.
                stacked = torch.stack(ps)
                finite = stacked.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
                left = torch.where(finite, orthonormal(stacked), torch.nan)
                copy_all(ps, left.unbind())
            self._sides = [1] * len(self._matrices)
            self._multiply(self._last, self._first.means)
        self._last.exchange.start()

    @override
    def wait(self) -> None:
        self._last.exchange.wait()

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        products = [self._products(i) for i in range(len(self._matrices))]
        # Waits for a GPU once, and so not with another precision. What is not finite shows in a
        # factor, which is small: to look there saves a pass over every residual.
        factors = [torch.cat([f.flatten() for f in both]) for pair in products for both in pair]
        finite = torch.stack([factor.isfinite().all() for factor in factors])
        factor, *known = torch.cat([scale.view(1), finite.to(scale.dtype)]).tolist()
        self._decode(products, 1.0 / factor, known)

    @full_precision()
    def _decode(
        self, products: Sequence[tuple[_Product, _Product]], share: float, known: Sequence[float]
    ) -> None:
        """Means into the gradients, residuals, and the factors of the next step.

        Args:
            share: 1 / the GradScaler's scale.
            known: whether own and mean approximation are finite, of one matrix after the other.
        """
        for i, (matrix, (own, mean)) in enumerate(zip(self._matrices, products, strict=True)):
            if matrix.residual is not None and known[2 * i]:
                left, right = own
                same = matrix.residual.shape == matrix.compensated.shape
                lost = matrix.residual if same else matrix.compensated
                torch.addmm(matrix.compensated, left, right.T, beta=share, alpha=-share, out=lost)
                if not same:
                    matrix.residual.copy_(matrix.shaped)
            torch.mm(mean[0], mean[1].T, out=matrix.compensated)
            if matrix.compensated is not matrix.gradient:
                matrix.gradient.copy_(matrix.shaped)
        self._start_next_from([i for i in range(len(products)) if known[2 * i + 1]])

    def _products(self, i: int) -> tuple[_Product, _Product]:
        """Own and mean approximation of matrix ``i``."""
        matrix, own, mean = self._matrices[i], self._last.owns[i], self._last.means[i]
        if not self._sides[i]:
            return (own, matrix.right), (mean, matrix.right)
        left = self._first.means[i] if self._codec.two_phase else matrix.left
        return (left, own), (left, mean)

    def _start_next_from(self, finite: Sequence[int]) -> None:
        """Orthonormal factors of the next step, of the matrices whose mean is ``finite``."""
        last = self._last  # only the span matters to the next step
        for numbers in _of_equal_shape(last.means, finite):
            kept = [(self._matrices[i], self._sides[i]) for i in numbers]
            factors = [matrix.right if side else matrix.left for matrix, side in kept]
            new = orthonormal(torch.stack([last.means[i] for i in numbers]))
            copy_all(factors, new.unbind())
            for matrix, side in kept:
                matrix.turn.fill_(1 - side)

    @property
    @override
    def sent(self) -> Sent:
        """Bytes of the step; before the first one, of the mean of two."""
        if not self._sides:
            return self._sent
        first, last = self._first.exchange.sent, self._last.exchange.sent
        return first + last if self._codec.two_phase else last

    @property
    @override
    def nbytes(self) -> int:
        copies = (m.compensated.nbytes for m in self._matrices if m.compensated is not m.gradient)
        return sum(factors.nbytes for factors in {self._first, self._last}) + sum(copies)


@units_of.register(PowerSGD)
def _units(
    codec: PowerSGD, slices: Sequence[ParameterSlice], bucket: Tensor, planner: FlatPlanner
) -> list[LowRankUnit]:
    return [LowRankUnit(codec, slices, bucket, planner)]


def _matrix(codec: PowerSGD, part: ParameterSlice, bucket: Tensor, planner: FlatPlanner) -> _Matrix:
    size = matrix_shape(part.shape)
    dtype = compute_dtype(bucket.dtype)
    gradient = part.shaped(part.of(bucket))
    try:
        gradient = gradient.view(size)
        compensated = gradient if dtype == bucket.dtype else gradient.to(dtype)
    except RuntimeError:  # the bucket cannot be viewed as a matrix
        compensated = gradient.reshape(size).to(dtype)
    first = codec.first_factors(part.name, part.shape, dtype)
    factors = planner.state.adopt_factors(part, first, device=bucket.device)
    residual = None
    if planner.memory_of(codec).kinds:
        flat = planner.state.per_rank("residual", part, dtype=dtype, device=bucket.device)
        residual = part.shaped(flat).view(gradient.shape)
    return _Matrix(gradient, compensated, residual, *factors)


def _of_equal_shape(tensors: Sequence[Tensor], numbers: Iterable[int]) -> list[list[int]]:
    """``numbers`` of tensors, those of one shape together: they are worked on in one batch."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i in numbers:
        by_shape.setdefault(tensors[i].shape, []).append(i)
    return list(by_shape.values())


def _views(flat: Tensor, sizes: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    parts = torch.split_with_sizes(flat.view(-1), [rows * rank for rows, rank in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
