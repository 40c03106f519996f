"""The arithmetic between gradient, residual and payload, against its own formulas."""

from __future__ import annotations

import pytest
import torch
from arguments import PASSES, arguments, same_bits
from torch import Tensor

from lightning_dist.codecs import BF16, FP16, BlockCodec, Int8, Payload
from lightning_dist.codecs.memory import ErrorFeedback, NoMemory
from lightning_dist.kernels import passes as module
from lightning_dist.kernels.passes import Factors, Kernels, compute_dtype

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
    make().server_feedback(residual, torch.tensor(1.0), shards, mean)
    torch.testing.assert_close(decoded(mean), torch.full((1, 5, 64), 3e38), rtol=0.01, atol=0)
    assert residual.isfinite().all()


def test_settle_writes_what_was_received_and_keeps_what_was_not_sent() -> None:
    grad, (residual,), scale, _, own, received = arguments(CODEC, rows=3, blocks=5)[
        "decode_and_commit"
    ]
    sent_for = grad + residual * SCALE
    make().decode_and_commit(grad, (residual,), scale, None, own, received)
    assert torch.equal(grad, decoded(received[0]))
    assert torch.equal(residual, (sent_for - decoded(own)) / SCALE)


def test_settle_adds_whole_payloads_in_the_order_of_ranks() -> None:
    """With two ranks: half the sum of both."""
    grad, state, scale, _, own, (first,) = arguments(CODEC, rows=1, blocks=5)["decode_and_commit"]
    second = arguments(CODEC, rows=1, blocks=5)["reduce"][0]
    kernels = make(size=2, factors=Factors(mean=0.5))
    kernels.decode_and_commit(grad, state, scale, None, own, (first, second))
    assert torch.equal(grad, (decoded(first) + decoded(second)) * 0.5)


def test_what_a_linear_codec_sent_stands_for_w_times_as_much() -> None:
    """It encodes x / W, so its own decoded payload stands for W times that."""
    codec = BF16()
    grad, (residual,), scale, _, own = arguments(codec, rows=1, blocks=9)["encode"]
    sent_for = grad + residual * SCALE
    linear = make(codec, size=4, factors=Factors(encode=0.25, own=4.0))
    linear.encode(grad, (residual,), scale, None, own)
    assert same_bits(own, codec.encode(sent_for * 0.25))
    linear.decode_and_commit(grad, (residual,), scale, None, own, (own,))
    assert torch.equal(residual, (sent_for - decoded(own, codec) * 4) / SCALE)


def test_carry_adds_w_times_the_second_rounding() -> None:
    residual, scale, shards, mean = arguments(CODEC, rows=3, blocks=5)["server_feedback"]
    before, total = residual.clone(), decoded(shards).sum(0, keepdim=True)
    make().server_feedback(residual, scale, shards, mean)
    expected = before + (total - 3 * decoded(mean)) / SCALE
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(residual, before)


@pytest.mark.parametrize("name", ["decode_and_commit", "encode_and_commit"])
def test_a_block_that_is_not_finite_keeps_its_residual(name: str) -> None:
    """The payload shows it all the same: a GradScaler has to see it."""
    grad, (residual,), scale, *_ = passes = arguments(CODEC, rows=3, blocks=5)[name]
    grad[1, 2, 7], grad[2, 4, 0] = torch.inf, torch.nan
    before, own = residual.clone(), passes[-1] if name == "encode_and_commit" else passes[-2]
    for plane, values in zip(own, CODEC.encode(grad + before * scale), strict=True):
        plane.copy_(values)
    getattr(make(), name)(*passes)
    kept = torch.tensor([[(r, b) in ((1, 2), (2, 4)) for b in range(5)] for r in range(3)])
    assert torch.equal((residual == before).all(-1), kept)
    assert torch.equal(decoded(own).isfinite().all(-1), ~kept)


def test_a_mean_that_is_not_finite_keeps_the_residual_of_its_owner() -> None:
    residual, scale, shards, mean = arguments(CODEC, rows=3, blocks=5)["server_feedback"]
    before = residual.clone()
    shards[0][1, 2] = mean[0][0, 2] = torch.nan
    make().server_feedback(residual, scale, shards, mean)
    assert (residual == before).all(-1).tolist() == [[False, False, True, False, False]]


def test_to_commit_when_encoding_gives_the_bits_of_committing_later() -> None:
    now, later = (arguments(CODEC, rows=3, blocks=13) for _ in range(2))
    make().encode_and_commit(*now["encode_and_commit"])
    make().encode(*later["encode"])
    *inputs, own = later["encode"]
    make().decode_and_commit(*inputs, own, (own,))
    assert same_bits(now["encode_and_commit"][1:], (*inputs[1:], own))


@pytest.mark.parametrize("name", PASSES)
def test_pieces_that_fit_a_cache_change_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (arguments(CODEC, rows=3, blocks=13)[name] for _ in range(2))
    of_kernels = "decode_and_commit" if name == "decode" else name
    getattr(make(), of_kernels)(*whole)
    monkeypatch.setattr(module, "_CACHE_ELEMENTS", 2 * 3 * CODEC.block)
    getattr(make(), of_kernels)(*cut)
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
