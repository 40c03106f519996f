"""``powersgd``: a matrix as the product of two thin ones."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, ExchangeName, Shape
from lightning_dist.codecs.none import NoCompression


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Rank-``r`` approximation of every gradient matrix ``M (n, m)``, one power iteration a step.

    Alternating (default, one allreduce a step): with ``Q (m, r)`` orthonormal and equal on all
    ranks, even steps send ``P = M Q`` and apply ``mean(P) Q^T``; odd steps do the same with
    the sides exchanged, starting from ``orth(mean P)``. ``two_phase`` (the paper's form, two
    dependent allreduces): ``P = orth(mean(M Q))``, ``Q = mean(M^T P)``, apply ``P Q^T``.

    A tensor of more than two dimensions is ``(shape[0], rest)``, whatever its order in memory.
    Tensors of fewer than two, and those for which ``r (n + m) >= n m``, travel uncompressed.

    Wire bytes per rank and step: ``2 (W-1)/W * 4 r n`` or ``4 r m`` in turn (``two_phase``: both).
    State: a residual per element, and the factors, ``r (n + m)``, equal on all ranks. The residual
    is local, ``M - P_local Q^T``: it stays bounded, and one inf does not poison it, unlike in
    torch's hook. Needs error feedback to be of use. For very slow links and large matrices.

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
    exchange: ClassVar[ExchangeName] = "allreduce"
    keeps_residual: ClassVar[bool] = True
    bit_exact: ClassVar[bool] = False
    whole_tensors: ClassVar[bool] = True
    keeps_factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        rank: object = self.rank
        if type(rank) is not int or not 1 <= rank <= 1024:
            raise ValueError(
                f"powersgd: rank must be a whole number from 1 to 1024, got {rank!r}; 1 to 8 is "
                "usual, more is closer to the gradient and more bytes"
            )

    @property
    def accepts(self) -> tuple[str, str]:
        return "matrices (n, m) with rank * (n + m) < n * m", "lower the rank"

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        n, m = matrix_shape(shape)
        return self if len(shape) >= 2 and self.rank * (n + m) < n * m else NoCompression()

    def leaves(self) -> tuple[Codec, ...]:
        return self, NoCompression()

    def first_factors(self, name: str, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Random orthonormal ``(n, r)`` and ``(m, r)`` on the CPU, equal on all ranks."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        n, m = matrix_shape(shape)
        left = torch.randn(n, self.rank, generator=generator, dtype=torch.float64)
        right = torch.randn(m, self.rank, generator=generator, dtype=torch.float64)
        return orthonormal(left).to(dtype), orthonormal(right).to(dtype)

    def payload_bytes(
        self, shape: Shape, *, step: int = 0, dtype: torch.dtype = torch.float32
    ) -> int:
        n, m = matrix_shape(shape)
        rows = n + m if self.two_phase else (n, m)[step % 2]
        return rows * self.rank * dtype.itemsize


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """``(n, m)`` in which a gradient of ``shape`` is approximated."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``matrix (n, r)``; for zeros, some. Never NaN."""
    q, _ = torch.linalg.qr(torch.nan_to_num(matrix, posinf=0.0, neginf=0.0))
    assert isinstance(q, Tensor)
    return q
