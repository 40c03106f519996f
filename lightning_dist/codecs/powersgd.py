"""``powersgd``: a matrix as the product of two thin ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, Shape
from lightning_dist.codecs.noise import mix
from lightning_dist.codecs.none import NoCompression
from lightning_dist.codecs.scales import full_precision


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Rank-``r`` approximation of every gradient matrix ``M (n, m)``, one power iteration per step.

    Alternating (default, one allreduce per step): with ``Q (m, r)`` orthonormal and equal on all
    ranks, the first exchange of a matrix sends ``P = M Q`` and applies ``mean(P) Q^T``; the next
    one does the same with the sides exchanged, starting from ``orth(mean P)``. Each matrix takes
    turns by itself, so one that is exchanged at every second step only sends both sides too.
    ``two_phase`` (the paper's form, two dependent allreduces): ``P = orth(mean(M Q))``,
    ``Q = mean(M^T P)``, apply ``P Q^T``.

    A tensor of more than two dimensions is ``(shape[0], rest)``, whatever its order in memory.
    Tensors of fewer than two, and those for which ``r (n + m) >= n m``, travel uncompressed.

    Wire bytes per rank and step: ``2 (W-1)/W * 4 r n`` or ``4 r m`` in turn (``two_phase``: both).
    State: a residual per element, and equal on all ranks the factors, ``r (n + m)``, and whose turn
    it is. The residual is local, ``M - P_local Q^T``: it stays bounded, and an inf does not stay in
    it, unlike in torch's hook. Use it with error feedback, for very slow links and large matrices.

    Replicas are bit-identical on equal hardware and libraries: factors are orthonormalised and
    multiplied by LAPACK and BLAS on every rank. The ranks compare their gradients every 100 steps,
    and the training fails where they differ. Products are in float32, also where the training
    allows TF32.

    PowerSGD: Vogels et al. (arXiv 1905.13727). Alternating: ACP-SGD, Zhang et al. (arXiv
    2306.08881).
    """

    rank: int = 4
    two_phase: bool = False
    seed: int = 0  # of the first factors

    name: ClassVar[str] = "powersgd"
    use: ClassVar[str] = "very slow links and large matrices"
    exchange: ClassVar[str] = "allreduce"
    keeps_residual: ClassVar[bool] = True
    bit_exact: ClassVar[bool] = False
    whole_tensors: ClassVar[bool] = True
    keeps_factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        rank: object = self.rank
        if type(rank) is not int or not 1 <= rank <= 1024:
            raise ValueError(
                f"powersgd: rank must be a whole number from 1 to 1024, got {rank!r}; 1 to 8 is "
                "usual; a higher rank is more accurate and sends more bytes"
            )

    @property
    def accepts(self) -> tuple[str, str]:
        return "matrices (n, m) with rank * (n + m) < n * m", "lower the rank"

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        n, m = matrix_shape(shape)
        return self if len(shape) >= 2 and self.rank * (n + m) < n * m else NoCompression()

    def leaves(self) -> tuple[Codec, ...]:
        return self, NoCompression()

    def first_factors(self, name: str, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Random orthonormal ``(n, r)`` and ``(m, r)`` on the CPU, and the turn; equal everywhere.

        The turn is 0-d: 0 where the next exchange sends ``(n, r)``, 1 where it sends ``(m, r)``.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        n, m = matrix_shape(shape)
        left = torch.randn(n, self.rank, generator=generator, dtype=torch.float64)
        right = torch.randn(m, self.rank, generator=generator, dtype=torch.float64)
        turn = torch.zeros((), dtype=torch.int64)
        return orthonormal(left).to(dtype), orthonormal(right).to(dtype), turn

    @full_precision()
    def approximate(
        self, x: Tensor, *, scale: Tensor, step: int, factors: Sequence[Tensor] = ()
    ) -> Tensor:
        """In the paper's form from the products of this rank alone."""
        matrix, (left, right, turn) = x.reshape(matrix_shape(x.shape)), factors
        if self.two_phase:
            left = orthonormal(matrix @ right)
        if self.two_phase or int(turn):
            return (left @ (left.mT @ matrix)).view(x.shape)
        return (matrix @ right @ right.mT).view(x.shape)

    def payload_bytes(
        self, shape: Shape, *, step: int = 0, dtype: torch.dtype = torch.float32
    ) -> int:
        """Bytes of the payload of a tensor that was exchanged at ``step`` steps before."""
        n, m = matrix_shape(shape)
        rows = n + m if self.two_phase else (n, m)[step % 2]
        return rows * self.rank * dtype.itemsize


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """``(n, m)`` in which a gradient of ``shape`` is approximated."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


_ROUNDING = 1e-13  # of an element of a Gram matrix in float64, with room to spare


def orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``matrices (..., n, r)``; for zeros, some. Never NaN.

    LAPACK's QR on a CPU, where it takes a tenth of the time of :func:`cholesky_qr`.
    """
    finite = torch.nan_to_num(matrices, posinf=0.0, neginf=0.0)
    if finite.device.type != "cpu":
        return cholesky_qr(finite)
    q, _ = torch.linalg.qr(finite)
    assert isinstance(q, Tensor)
    return q


def cholesky_qr(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``matrices (..., n, r)``, ``n >= r``, all finite.

    Cholesky-QR of the whole batch in float64, three times: as many launches for many matrices as
    for one, and nothing waits for the device. A column that is within about 1e-5 of the span of
    those before it, in proportion to its norm, is replaced by one that depends on its place alone.
    """
    *_, n, r = matrices.shape
    columns = _normalized(matrices.double())
    others = _normalized(_others(n, r, device=matrices.device))
    shift = _ROUNDING * r * torch.eye(r, dtype=torch.float64, device=matrices.device)
    # A Gram matrix is known to the rounding only: with it added the factor exists.
    distances, _ = torch.linalg.cholesky_ex(columns.mT @ columns + shift)
    dependent = distances.diagonal(dim1=-2, dim2=-1).square() < 100 * _ROUNDING * r
    columns = torch.where(dependent.unsqueeze(-2), others, columns)
    for _ in range(3):  # the first may leave angles, as the condition is squared
        factor, _ = torch.linalg.cholesky_ex(columns.mT @ columns + shift)
        columns = torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False)
        shift = torch.zeros_like(shift)
    return columns.to(matrices.dtype)


def _normalized(columns: Tensor) -> Tensor:
    """Columns of norm 1; those of zeros stay."""
    largest = columns.abs().amax(-2, keepdim=True)
    columns = columns / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    return columns / torch.where(norm > 0, norm, 1.0)


def _others(n: int, r: int, *, device: torch.device) -> Tensor:
    """``(n, r)`` that look random: the same on every rank, whatever its device."""
    places = torch.arange(n * r, dtype=torch.int32, device=device).view(n, r)
    return mix(places).double() / 2.0**31
