"""What is true in the mean: unbiasedness, variance, contraction, and orthonormal factors."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import TABLE, gradients
from torch import Tensor

from lightning_dist.codecs import QSGD, BlockCodec, RandomK, Sign, TernGrad, TopK, noise
from lightning_dist.codecs.laws import decoded, fits
from lightning_dist.codecs.powersgd import cholesky_qr, orthonormal

_DRAWS = 4000
UNBIASED: list[BlockCodec] = [
    QSGD(64, 2),
    QSGD(64, 4),
    QSGD(64, 8),
    QSGD(64, 4, "l2"),
    QSGD(64, 2, "l2"),
    TernGrad(64),
    RandomK(0.1, 64, unbiased=True),
]


def heavy(block: int, *, seed: int) -> Tensor:
    """One block with a spike, a zero and small elements."""
    x = torch.randn(1, block, generator=torch.Generator().manual_seed(seed))
    x[0, 0], x[0, 1], x[0, 2] = 6.0, 0.0, -1e-3
    return x


def draws(codec: BlockCodec, x: Tensor, *, salt: int = 0) -> Tensor:
    """``(_DRAWS, block)``: independent decodings of the one block ``x``, in float64."""
    return decoded(codec, x.expand(_DRAWS, -1).contiguous(), salt=salt).double()


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_the_mean_of_many_draws_is_the_gradient(codec: BlockCodec) -> None:
    """Within five standard errors, each element; the bfloat16 scale brings no bias."""
    x = heavy(codec.block, seed=3)
    drawn = draws(codec, x)
    error = drawn.std(0) / _DRAWS**0.5
    # What never varied in 4000 draws may still be this far from its mean.
    never_seen = codec.error_bound(x).double()[0] * 10 / _DRAWS
    allowed = torch.where(error > 0, 5 * error, never_seen)
    assert ((drawn.mean(0) - x[0].double()).abs() <= allowed + 1e-6 * x[0].abs()).all()


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_the_variance_is_the_promised_one(codec: BlockCodec) -> None:
    """QSGD, TernGrad: s^2 p (1-p) with s up to 0.8 % larger; RandomK: (block/k - 1) x^2."""
    x = heavy(codec.block, seed=4)
    got = (draws(codec, x) - x.double()).square().sum(-1).mean()
    if isinstance(codec, RandomK):
        expected = (codec.block / codec.k - 1) * x.double().square().sum()
    else:
        levels = codec.levels if isinstance(codec, QSGD) else 1
        l2 = isinstance(codec, QSGD) and codec.norm == "l2"
        step = (x.double().norm() if l2 else x.double().abs().max()) / levels
        p = (x.double() / step) % 1
        expected = step**2 * (p * (1 - p)).sum()
    assert 0.85 < got / expected < 1.15


@pytest.mark.parametrize(
    "codec", [c for c in TABLE if c.contraction and not c.stochastic], ids=repr
)
@given(data=st.data())
def test_contractions_lose_less_than_they_are_given(codec: BlockCodec, data: st.DataObject) -> None:
    """|C(x) - x|^2 <= (1 - delta) |x|^2, delta of the paper up to the rounding of the wire."""
    x = data.draw(gradients(codec, torch.float64)).view(-1, codec.block)
    # Block scales do not reach below float32's smallest normal number.
    x = x.where(x.abs().amax(-1, keepdim=True) > 1e-30, 0.0)
    if not fits(codec, x):
        return
    energy = x.square().sum(-1)
    lost = (decoded(codec, x) - x).square().sum(-1)
    assert (lost <= (1 - delta(codec, x)) * energy).all()


def delta(codec: BlockCodec, x: Tensor) -> Tensor:
    """The share of the energy of each block that the codec promises to keep."""
    none = x.new_zeros(len(x))
    if isinstance(codec, Sign):
        kept = x.abs().sum(-1).square() / (codec.block * x.square().sum(-1))
        return torch.where(kept.isfinite(), kept * (1 - 2.0**-13), none)
    if isinstance(codec, TopK):
        rounding = {"bf16": 2.0**-16, "fp32": 1e-12, "int8": 0.26}.get(codec.values)
        if rounding is None:  # two means keep more than one, which keeps a k-th of what is sent
            rounding = 1 - (1 - 2.0**-6) / codec.k
        return none + codec.k / codec.block * (1 - rounding)
    return none


@pytest.mark.parametrize("codec", [RandomK(0.1, 64), QSGD(64, 4), QSGD(512, 8, "l2")], ids=repr)
def test_stochastic_contractions_in_expectation(codec: BlockCodec) -> None:
    assert codec.contraction
    x = heavy(codec.block, seed=5)
    lost = (draws(codec, x) - x.double()).square().sum(-1).mean() / x.double().square().sum()
    limit = 1 - codec.k / codec.block if isinstance(codec, RandomK) else 1
    assert lost < limit * 1.02


def test_qsgd_knows_whether_it_is_a_contraction() -> None:
    """The worst block: one element at the norm and the others at a quarter step, or all at half."""
    named = {(4, "max", 384), (4, "max", 512), (8, "max", 65536), (4, "l2", 128), (4, "l2", 256)}
    for case in product([2, 4, 8], ["max", "l2"], [16, 128, 256, 384, 400, 512, 65536]):
        bits, norm, size = case
        codec = QSGD(size, bits, norm)
        if norm == "l2":
            worst = torch.full((size,), codec.levels / size**0.5).double()
        else:
            worst = torch.full((size,), 0.25).double()
            worst[0] = codec.levels
        p = worst % 1
        loses_less = (p * (1 - p)).sum() < worst.square().sum()
        assert loses_less or not codec.contraction, case
        if case in named:
            assert codec.contraction == loses_less, case


def test_places_of_randomk_are_distinct_and_equally_likely() -> None:
    codec = RandomK(0.25, 64)
    sent = draws(codec, torch.ones(1, 64)) != 0
    assert (sent.sum(-1) == codec.k).all()
    deviation = (0.25 * 0.75 / _DRAWS) ** 0.5
    assert ((sent.double().mean(0) - 0.25).abs() < 5 * deviation).all()


def test_another_salt_is_another_draw_and_the_same_one_the_same() -> None:
    for codec in UNBIASED:
        x = heavy(codec.block, seed=6)
        assert torch.equal(draws(codec, x, salt=7), draws(codec, x, salt=7))
        assert not torch.equal(draws(codec, x, salt=7), draws(codec, x, salt=8))


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    keys = noise.block_keys(torch.arange(1000, dtype=torch.int32), 5).unsqueeze(-1)
    numbers = noise.uniform24(keys, 256).double() * 2.0**-24
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    expected = numbers.numel() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 63 - 5 * 126**0.5 < chi_square < 63 + 5 * 126**0.5
    assert torch.equal(numbers, noise.uniform24(keys, 256).double() * 2.0**-24)


@pytest.mark.parametrize("salts", [(0, 1), (-1, 0), (2**31, 2**31 + 1), (2**32 + 1, 0)], ids=str)
def test_different_keys_are_independent(salts: tuple[int, int]) -> None:
    """Neighbouring salts, neighbouring blocks and neighbouring elements are uncorrelated."""
    blocks = torch.arange(500, dtype=torch.int32)
    a, b = (
        noise.uniform24(noise.block_keys(blocks, salt).unsqueeze(-1), 256).double() * 2.0**-24 - 0.5
        for salt in salts
    )
    for first, second in ((a, b), (a[1:], a[:-1]), (a[:, 1:], a[:, :-1])):
        correlation = (first * second).mean() * 12
        assert abs(correlation) < 5 / first.numel() ** 0.5


@given(st.lists(st.integers(-(2**31), 2**31 - 1), unique=True, min_size=2, max_size=50))
def test_mix_is_injective(numbers: list[int]) -> None:
    mixed = noise.mix(torch.tensor(numbers, dtype=torch.int32))
    assert len(set(mixed.tolist())) == len(numbers)


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
