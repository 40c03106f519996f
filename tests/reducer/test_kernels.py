"""The arithmetic between gradient, residual and payload, against its own formulas."""

from __future__ import annotations

import pytest
import torch
from arguments import PASSES, arguments, same_bits
from torch import Tensor

from lightning_dist.codecs import BF16, FP16, BlockCodec, Int8, Payload
from lightning_dist.reducer import kernels as module
from lightning_dist.reducer.kernels import Factors, Kernels, compute_dtype
from lightning_dist.reducer.memory import ErrorFeedback, NoMemory

CODEC = Int8(block_size=64)
SCALE = 8.0


def make(codec: BlockCodec = CODEC, size: int = 3, factors: Factors | None = None) -> Kernels:
    return Kernels(codec, memory=ErrorFeedback(), factors=factors or Factors(), world_size=size)


def decoded(payload: Payload, codec: BlockCodec = CODEC) -> Tensor:
    return codec.decode(payload, torch.float32)


def test_encode_adds_the_scaled_residual() -> None:
    grad, (residual,), scale, _, own = arguments(CODEC, rows=3, blocks=5)["encode"]
    make().encode(grad, (residual,), scale, None, own)
    assert same_bits(own, CODEC.encode(grad + residual * SCALE))


def test_encode_without_a_residual() -> None:
    grad, _, scale, _, own = arguments(CODEC, rows=3, blocks=5)["encode"]
    passes = Kernels(CODEC, memory=NoMemory(), factors=Factors(), world_size=3)
    passes.encode(grad, (), scale, None, own)
    assert same_bits(own, CODEC.encode(grad))


def test_reduce_is_the_encoded_mean_of_the_ranks() -> None:
    """In rank order; with four ranks the division is exact, wherever it happens."""
    shards, _, mean = arguments(CODEC, rows=4, blocks=5)["reduce"]
    make(size=4).reduce(shards, None, mean)
    of_rank = decoded(shards)
    total = ((of_rank[0] + of_rank[1]) + of_rank[2]) + of_rank[3]
    assert same_bits(mean, CODEC.encode(total.unsqueeze(0) / 4))


def test_reduce_and_carry_do_not_overflow_where_the_mean_does_not() -> None:
    shards, _, mean = arguments(CODEC, rows=3, blocks=5)["reduce"]
    for out, plane in zip(shards, CODEC.encode(torch.full((3, 5, 64), 3e38)), strict=True):
        out.copy_(plane)
    residual = torch.zeros(1, 5, 64)
    make().reduce(shards, None, mean)
    make().carry(residual, torch.tensor(1.0), torch.tensor(True), shards, mean)
    torch.testing.assert_close(decoded(mean), torch.full((1, 5, 64), 3e38), rtol=0.01, atol=0)
    assert residual.isfinite().all()


def test_settle_writes_what_was_received_and_keeps_what_was_not_sent() -> None:
    grad, (residual,), scale, ok, _, own, received = arguments(CODEC, rows=3, blocks=5)["settle"]
    sent_for = grad + residual * SCALE
    make().settle(grad, (residual,), scale, ok, None, own, received)
    assert torch.equal(grad, decoded(received[0]))
    assert torch.equal(residual, (sent_for - decoded(own)) / SCALE)


def test_settle_adds_whole_payloads_in_the_order_of_ranks() -> None:
    """With two ranks: half the sum of both."""
    grad, state, scale, ok, _, own, (first,) = arguments(CODEC, rows=1, blocks=5)["settle"]
    second = arguments(CODEC, rows=1, blocks=5)["reduce"][0]
    kernels = make(size=2, factors=Factors(mean=0.5))
    kernels.settle(grad, state, scale, ok, None, own, (first, second))
    assert torch.equal(grad, (decoded(first) + decoded(second)) * 0.5)


def test_what_a_linear_codec_sent_stands_for_w_times_as_much() -> None:
    """It encodes x / W, so its own decoded payload stands for W times that."""
    codec = BF16()
    grad, (residual,), scale, _, own = arguments(codec, rows=1, blocks=9)["encode"]
    sent_for = grad + residual * SCALE
    linear = make(codec, size=4, factors=Factors(encode=0.25, own=4.0))
    linear.encode(grad, (residual,), scale, None, own)
    assert same_bits(own, codec.encode(sent_for * 0.25))
    linear.settle(grad, (residual,), scale, torch.tensor(True), None, own, (own,))
    assert torch.equal(residual, (sent_for - decoded(own, codec) * 4) / SCALE)


def test_carry_adds_w_times_the_second_rounding() -> None:
    residual, scale, ok, shards, mean = arguments(CODEC, rows=3, blocks=5)["carry"]
    before, total = residual.clone(), decoded(shards).sum(0, keepdim=True)
    make().carry(residual, scale, ok, shards, mean)
    expected = before + (total - 3 * decoded(mean)) / SCALE
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(residual, before)


def test_a_step_that_is_not_finite_keeps_every_residual() -> None:
    """The gradient is written all the same: a GradScaler has to see it."""
    passes = arguments(CODEC, rows=3, blocks=5, ok=False)
    grad, (residual,), scale, ok, _, own, received = passes["settle"]
    received[0][0].fill_(torch.nan)
    own[0].fill_(torch.inf)
    before = residual.clone()
    make().settle(grad, (residual,), scale, ok, None, own, received)
    make().carry(residual[:1], scale, ok, *passes["carry"][3:])
    assert torch.equal(residual, before)
    assert grad.isnan().all()


@pytest.mark.parametrize("name", PASSES)
def test_pieces_that_fit_a_cache_change_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (arguments(CODEC, rows=3, blocks=13)[name] for _ in range(2))
    getattr(make(), name)(*whole)
    monkeypatch.setattr(module, "_CACHE_ELEMENTS", 2 * 3 * CODEC.block)
    getattr(make(), name)(*cut)
    assert same_bits(cut, whole)


def test_arithmetic_is_in_float32_or_better() -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert [compute_dtype(dtype) for dtype in dtypes] == [torch.float32] * 3 + [torch.float64]


def test_a_short_gradient_is_not_rounded_on_the_way() -> None:
    """bfloat16 gradient, float32 residual: the sum keeps the residual's small part."""
    codec, shape = FP16(), (1, 4, 1)
    grad, residual = torch.ones(shape, dtype=torch.bfloat16), torch.full(shape, 2e-3)
    own = (torch.zeros(shape, dtype=torch.float16),)
    make(codec, size=2).encode(grad, (residual,), torch.tensor(1.0), None, own)
    assert same_bits(own, codec.encode(torch.full(shape, 1.002)))
    assert (own[0] > 1).all()
