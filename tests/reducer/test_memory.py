"""The formulas of what is sent and what is kept, in units of the unscaled gradient."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from lightning_dist.codecs import DGC, RandomK, resolve_codec
from lightning_dist.codecs.memory import (
    ErrorFeedback,
    Memory,
    Momentum,
    MomentumCorrection,
    NoMemory,
)

SCALE = torch.tensor(8.0, dtype=torch.float64)
SHAPE = (2, 3, 16)
MOMENTUM = 0.7


def numbers(generator: torch.Generator) -> Tensor:
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_no_memory_sends_the_gradient_and_keeps_nothing(generator: torch.Generator) -> None:
    x, sent = numbers(generator), numbers(generator)
    memory = NoMemory()
    assert memory.kinds == ()
    assert torch.equal(memory.compensated(x, (), SCALE), x)
    assert memory.after(x, x, sent, (), SCALE) == ()


def test_error_feedback(generator: torch.Generator) -> None:
    """``p = g + e``, ``e <- p - sent``: g, p and sent carry the scale, e does not."""
    gradient, owed, sent = (numbers(generator) for _ in range(3))
    memory = ErrorFeedback()
    assert memory.kinds == ("residual",)
    compensated = memory.compensated(gradient * SCALE, (owed,), SCALE)
    close(compensated, (gradient + owed) * 8)
    (after,) = memory.after(gradient * SCALE, compensated, sent * SCALE, (owed,), SCALE)
    close(after, gradient + owed - sent)


def test_momentum_correction(generator: torch.Generator) -> None:
    """``u <- m u + g``, ``p = v + u``, ``v <- p - sent``; u is 0 where something was sent."""
    gradient, owed, velocity, sent = (numbers(generator) for _ in range(4))
    sent[..., ::2] = 0
    memory = MomentumCorrection(MOMENTUM)
    assert memory.kinds == ("residual", "momentum")
    state = (owed, velocity)
    compensated = memory.compensated(gradient * SCALE, state, SCALE)
    new_velocity = MOMENTUM * velocity + gradient
    close(compensated, (owed + new_velocity) * 8)
    after, masked = memory.after(gradient * SCALE, compensated, sent * SCALE, state, SCALE)
    close(after, owed + new_velocity - sent)
    close(masked[..., ::2], new_velocity[..., ::2])
    assert not masked[..., 1::2].any()


@pytest.mark.parametrize(
    "memory", [ErrorFeedback(), Momentum(MOMENTUM), MomentumCorrection(MOMENTUM)], ids=str
)
def test_a_scale_that_changes_leaves_no_trace(memory: Memory, generator: torch.Generator) -> None:
    """Powers of two: the same bits, whatever the scale was at each step."""
    gradients = [numbers(generator) for _ in range(6)]

    def run(scales: list[float]) -> list[Tensor]:
        state = tuple(torch.zeros(SHAPE, dtype=torch.float64) for _ in memory.kinds)
        seen = []
        for gradient, factor in zip(gradients, scales, strict=True):
            scale = torch.tensor(factor, dtype=torch.float64)
            x = gradient * scale
            compensated = memory.compensated(x, state, scale)
            sent = torch.where(compensated.abs() > scale, compensated, 0.0)
            state = memory.after(x, compensated, sent, state, scale)
            seen += [compensated / scale, *state]
        return seen

    constant, changing = run([1.0] * 6), run([1.0, 1024.0, 8.0, 8.0, 0.5, 2.0])
    assert all(map(torch.equal, changing, constant))


@pytest.mark.parametrize("memory", [NoMemory(), ErrorFeedback(), MomentumCorrection(0.9)], ids=str)
def test_it_is_pure(memory: Memory, generator: torch.Generator) -> None:
    """The reducer keeps the old state of a step that was not finite."""
    x, sent = numbers(generator), numbers(generator)
    state = tuple(numbers(generator) for _ in memory.kinds)
    before = [tensor.clone() for tensor in (x, sent, *state)]
    compensated = memory.compensated(x, state, SCALE)
    memory.after(x, compensated, sent, state, SCALE)
    assert all(map(torch.equal, (x, sent, *state), before))


Wish = bool | Literal["auto"]
TABLE: list[tuple[str, Wish, Memory]] = [
    ("none", "auto", NoMemory()),
    ("none", True, NoMemory()),
    ("fp16", "auto", NoMemory()),
    ("fp16", True, ErrorFeedback()),
    ("int8", "auto", ErrorFeedback()),
    ("int8", False, NoMemory()),
    ("sign", "auto", ErrorFeedback()),
    ("qsgd", "auto", NoMemory()),
    ("terngrad", "auto", NoMemory()),
    ("topk", "auto", ErrorFeedback()),
    ("topk", False, NoMemory()),
    ("randomk", "auto", ErrorFeedback()),
    ("randomk:unbiased=true", "auto", NoMemory()),
    ("threshold", "auto", ErrorFeedback()),
    ("powersgd", "auto", ErrorFeedback()),
    ("powersgd", False, NoMemory()),
    ("dgc", "auto", MomentumCorrection(0.9)),
    ("dgc:momentum=0.5", "auto", MomentumCorrection(0.5)),
    ("dgc:momentum=0.5", True, MomentumCorrection(0.5)),
    ("dgc:momentum=0", "auto", ErrorFeedback()),
]


@pytest.mark.parametrize(("codec", "wish", "expected"), TABLE)
def test_the_memory_of_a_codec(codec: str, wish: Wish, expected: Memory) -> None:
    assert resolve_codec(codec).memory(wish) == expected


def test_codec_objects_are_asked_themselves() -> None:
    assert DGC(momentum=0.25).memory("auto") == MomentumCorrection(0.25)
    assert RandomK(unbiased=True).memory("auto") == NoMemory()
