"""The contracts that every row of the table keeps, in a real DDP, whatever exchange it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    SHAPES,
    Fed,
    Tensors,
    backward,
    compressed,
    feed,
    mean,
    residuals,
    step_digest,
)
from saving import train
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS, resolve_codec

DOUBLE = torch.float64
SETTINGS = {"min_compress_numel": 256}

# Others keep no residual by default, or (dgc) sum momenta and not gradients.
with_residual = [c for c in EVERY_CODEC if resolve_codec(c).keeps_residual and "dgc" not in c]
# A ring adds in an order that depends on the place in the bucket, which a restart changes.
exact_for_three = [c for c in EVERY_CODEC if resolve_codec(c).exchange != "allreduce"]


def test_every_row_is_here() -> None:
    assert {resolve_codec(codec).name for codec in EVERY_CODEC} == set(CODECS)


@dataclass
class Sums:
    inputs: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    residual: Tensors = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


def run(rank: Rank, codec: str, steps: int) -> Sums:
    sums = Sums()
    with compressed(rank, Fed(dtype=DOUBLE), codec, **SETTINGS) as (model, reducer):
        for step in range(steps):
            given = feed(rank.rank, step, dtype=DOUBLE)
            for total, more in ((sums.inputs, given), (sums.outputs, backward(model, given))):
                for name, value in more.items():
                    total[name] = total.get(name, torch.zeros_like(value)) + value
            held = residuals(reducer)
            sums.norms.append(float(torch.cat(list(held.values())).norm()))
        sums.residual = {name: held[name].view(SHAPES[name]) for name in held}
    return sums


@pytest.mark.parametrize("codec", with_residual)
@pytest.mark.parametrize("size", [2, 3])
def test_error_feedback_conserves_gradients(codec: str, size: int) -> None:
    """sum of outputs + mean residual == sum of mean inputs, and the residual levels off."""
    ranks = run_threads(lambda rank: run(rank, codec, 120), size)
    went_in, owed = mean([r.inputs for r in ranks]), mean([r.residual for r in ranks])
    assert set(owed) == {"first", "second"}
    # What the payload's own dtype (float32 scales, factors, ring sums) rounds is not a loss.
    for name, residual in owed.items():
        lost = ranks[0].outputs[name] + residual - went_in[name]
        assert lost.abs().max() < 1e-9 * went_in[name].abs().max() * size
    for rank in ranks:
        assert 0 < rank.norms[-1] < 1.5 * max(rank.norms[:60])


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_a_resumed_run_of_two_equals_the_uninterrupted_one(codec: str) -> None:
    whole = train(2, range(5), codec=codec)
    resumed = train(2, range(3, 5), train(2, range(3), codec=codec).state, codec=codec)
    assert resumed.digests == [digests[3:] for digests in whole.digests]


@pytest.mark.parametrize("codec", exact_for_three)
def test_a_resumed_run_of_three_too(codec: str) -> None:
    whole = train(3, range(4), codec=codec)
    resumed = train(3, range(2, 4), train(3, range(2), codec=codec).state, codec=codec)
    assert resumed.digests == [digests[2:] for digests in whole.digests]


@pytest.mark.parametrize("codec", EVERY_CODEC)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_gradients(codec: str, dtype: torch.dtype) -> None:
    """Models in 16 bits: the gradients arrive and leave in their dtype, replicas agree."""

    def body(rank: Rank) -> tuple[str, bool]:
        with compressed(rank, Fed(dtype=dtype), codec, **SETTINGS) as (model, reducer):
            for step in range(3):
                gradients = backward(model, feed(rank.rank, step, dtype=dtype))
            assert {g.dtype for g in gradients.values()} == {dtype}
            finite = all(g.isfinite().all() for g in gradients.values())
            reducer.state.load({}, reducer.network.rows)  # residuals differ between ranks
            return step_digest(gradients, reducer), bool(finite)

    first, *others = run_threads(body, 3)
    assert first[1]
    assert others == [first] * 2


@pytest.mark.parametrize("codec", EVERY_CODEC)
@pytest.mark.parametrize(
    "shapes",
    [
        {"one": (1, 1), "square": (9, 9)},  # the second so that there is work for powersgd
        {"odd": (7, 3), "empty": (0, 5), "row": (1, 300), "column": (300, 1)},
        {"deep": (5, 4, 3, 3), "zero": (2, 0, 3), "scalar": ()},
    ],
    ids=["one", "thin", "deep"],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_odd_shapes(codec: str, shapes: dict[str, tuple[int, ...]], size: int) -> None:
    """Sizes 0, 1 and odd, everything compressed; zeros, denormals and huge values among them."""

    def body(rank: Rank) -> list[bool]:
        settings = {"min_compress_numel": 0}
        with compressed(rank, Fed(shapes), codec, **settings) as (model, _):
            finite = []
            for factor in (1.0, 0.0, 1e-42, 1e30 if is_wide(codec) else 1.0, 1.0):
                given = {n: g * factor for n, g in feed(rank.rank, 0, shapes).items()}
                finite += [bool(g.isfinite().all()) for g in backward(model, given).values()]
        return finite

    for finite in run_threads(body, size):
        assert all(finite)


def is_wide(codec: str) -> bool:
    """Whether 1e30 fits the wire, and its rank-r or rotated form fits float32."""
    return not codec.startswith("fp16")


def test_zeros_in_are_zeros_out_for_every_codec() -> None:
    for codec in EVERY_CODEC:

        def body(rank: Rank, codec: str = codec) -> bool:
            zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            with compressed(rank, Fed(), codec, **SETTINGS) as (model, _):
                for _ in range(3):
                    gradients = backward(model, zeros)
            return any(bool(g.any()) for g in gradients.values())

        assert run_threads(body, 2) == [False, False], codec
