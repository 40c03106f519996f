"""Cholesky-QR against Householder's in float64: the same span, orthonormal, and never NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dist.codecs.powersgd import cholesky_qr, orthonormal

EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(matrices: Tensor) -> Tensor:
    """Orthonormal to the rounding, and nothing of the columns is outside of the span."""
    found = cholesky_qr(matrices)
    assert found.dtype == matrices.dtype
    assert found.shape == matrices.shape
    q, epsilon = found.double(), EPSILON[matrices.dtype]
    gram = q.mT @ q
    torch.testing.assert_close(
        gram, torch.eye(q.shape[-1]).double().expand_as(gram), rtol=0, atol=20 * epsilon
    )
    return q


def outside(q: Tensor, matrices: Tensor) -> Tensor:
    """The part of every column that is not in the span of ``q``, in proportion to its norm."""
    columns = matrices.double()
    columns = columns / columns.abs().amax(-2, keepdim=True)
    columns = columns / columns.norm(dim=-2, keepdim=True)
    return (columns - q @ (q.mT @ columns)).norm(dim=-2)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
@pytest.mark.parametrize(("n", "r"), [(40, 2), (300, 8), (5, 4), (64, 64)])
def test_the_span_is_that_of_householders(
    n: int, r: int, condition: float, dtype: torch.dtype
) -> None:
    """``condition``: how much longer the columns are together than apart."""
    common = normal(3, n, 1, seed=1)
    matrices = (common + normal(3, n, r) / condition).to(dtype)
    q = check(matrices)
    reference, _ = torch.linalg.qr(matrices.double())
    assert (outside(q, matrices) < 100 * EPSILON[dtype]).all()
    between = q @ q.mT - reference @ reference.mT
    assert between.norm(dim=(-2, -1)).max() < 1000 * condition * r * EPSILON[dtype]


@pytest.mark.parametrize("dtype", EPSILON)
def test_columns_of_very_different_sizes(dtype: torch.dtype) -> None:
    sizes = torch.tensor([1e-30, 1e30, 1.0, 2.0**-140], dtype=torch.float64)
    matrices = (normal(2, 40, 4) * sizes).to(dtype)
    q = check(matrices)
    assert (outside(q, matrices) < 100 * EPSILON[dtype]).all()


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_dependent_columns_are_replaced(rank: int, dtype: torch.dtype) -> None:
    """The others keep their span, in batches of any company."""
    low = (normal(40, rank) @ normal(rank, 4, seed=1)).to(dtype)
    full = normal(40, 4, seed=2).to(dtype)
    q, beside = check(torch.stack([low, full]))
    if rank:
        assert (outside(q, low) < 1e-5).all()
    assert (outside(beside, full) < 100 * EPSILON[dtype]).all()


def test_batches_change_no_bits() -> None:
    matrices = normal(5, 100, 4).float()
    together = cholesky_qr(matrices)
    assert all(torch.equal(together[i : i + 1], cholesky_qr(matrices[i : i + 1])) for i in range(5))


def test_what_is_not_finite_counts_as_zero() -> None:
    matrix = normal(40, 4)
    matrix[3, 1], matrix[5, 2] = torch.nan, torch.inf
    assert orthonormal(matrix).isfinite().all()
