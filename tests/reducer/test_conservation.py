"""Contract 2: with error feedback no gradient is lost, only sent later.

sum of outputs + mean residual == sum of mean inputs, and the residual stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from feeding import SHAPES, Fed, Tensors, backward, compressed, feed, mean, residuals
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import FP16, Codec, Int8, NoCompression

DOUBLE = torch.float64


@dataclass
class Totals:
    """What one rank put in and got out, summed over the steps, and what it still holds."""

    inputs: Tensors
    outputs: Tensors
    residual: Tensors
    norms: list[float]  # of the residual after every 100 steps, and at the end


def run(
    rank: Rank, steps: int, codec: Codec, *, shapes: dict[str, tuple[int, ...]], bias: float = 0.0
) -> Totals:
    """``bias``: how far the ranks' gradients lie apart in every step."""
    totals = Totals({}, {}, {}, [])
    settings = {"min_compress_numel": 0, "error_feedback": True}
    with compressed(rank, Fed(shapes, DOUBLE), codec, **settings) as (model, reducer):
        for step in range(steps):
            given = {
                name: value + bias * rank.rank
                for name, value in feed(rank.rank, step, shapes, DOUBLE).items()
            }
            add(totals.inputs, given)
            add(totals.outputs, backward(model, given))
            if step % 100 == 99 or step == steps - 1:
                held = residuals(reducer)
                totals.norms.append(norm(held))
        # One element is uncompressed: a block would be more bytes.
        totals.residual = {
            name: held.get(name, torch.zeros(shape, dtype=DOUBLE)).view(shape)
            for name, shape in shapes.items()
        }
    return totals


def add(total: Tensors, more: Tensors) -> None:
    for name, value in more.items():
        total[name] = total.get(name, torch.zeros_like(value)) + value


def norm(tensors: Tensors) -> float:
    return float(torch.cat([t.flatten() for t in tensors.values()]).norm())


def lost(ranks: list[Totals]) -> float:
    """Largest relative difference between what went in and what came out or is still held."""
    went_in, held = mean([r.inputs for r in ranks]), mean([r.residual for r in ranks])
    return max(
        float((ranks[0].outputs[n] + held[n] - went_in[n]).abs().max() / went_in[n].abs().max())
        for n in went_in
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_thousand_steps_conserve_mass_and_bound_the_residual(size: int) -> None:
    """Ranks that disagree by a constant, the case in which ``e = p - mean`` grows for ever."""
    shapes = {"weight": (25, 30)}
    codec, steps = Int8(block_size=256), 1000
    ranks = run_threads(lambda rank: run(rank, steps, codec, shapes=shapes, bias=1.0), size)
    assert lost(ranks) < 1e-10
    for rank in ranks:
        assert 0 < rank.norms[-1] < 3 * rank.norms[0]
    wrong = norms_of_the_difference_from_the_mean(codec, size, steps, shapes["weight"])
    assert wrong[-1] > 5 * wrong[99] > 50 * ranks[0].norms[0]


def norms_of_the_difference_from_the_mean(
    codec: Codec, size: int, steps: int, shape: tuple[int, ...]
) -> list[float]:
    """Rank 0's residual as torch's PowerSGD hook keeps it, e = p - mean, for the same inputs."""
    held = [torch.zeros(shape, dtype=DOUBLE) for _ in range(size)]
    norms = []
    for step in range(steps):
        own = [feed(r, step, {"w": shape}, DOUBLE)["w"] + r + held[r] for r in range(size)]
        average = sum(decoded(codec, x) for x in own) / size
        held = [x - average for x in own]
        norms.append(float(held[0].norm()))
    return norms


def decoded(codec: Codec, x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % codec.block))
    payload = codec.encode(padded.view(-1, codec.block))
    return codec.decode(payload, x.dtype).flatten()[: x.numel()].view_as(x)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("block_size", [16, 256, 4096])
def test_every_cut_conserves_mass(size: int, block_size: int) -> None:
    """Whole and broken rows and blocks, more ranks than blocks, 1-D and 0-D parameters."""
    shapes = {**SHAPES, "scalar": (), "one": (1,), "block": (block_size,)}
    ranks = run_threads(lambda rank: run(rank, 5, Int8(block_size), shapes=shapes), size)
    assert lost(ranks) < 1e-12
    assert all(rank.norms[-1] > 0 for rank in ranks)


@pytest.mark.parametrize("size", [2, 4])
def test_linear_codecs_lose_only_what_the_network_rounds(size: int) -> None:
    """The residual holds what the cast lost; sums inside the ring are rounded on their way."""
    ranks = run_threads(lambda rank: run(rank, 12, FP16(), shapes=SHAPES), size)
    rounding = 2.0**-11
    assert 0 < lost(ranks) < 2 * rounding
    with_none = run_threads(lambda rank: run_plain(rank, 12), size)
    assert lost(with_none) < 1e-12


def run_plain(rank: Rank, steps: int) -> Totals:
    totals = Totals({}, {}, {n: torch.zeros(s, dtype=DOUBLE) for n, s in SHAPES.items()}, [])
    with compressed(rank, Fed(SHAPES, DOUBLE), NoCompression()) as (model, reducer):
        for step in range(steps):
            given = feed(rank.rank, step, SHAPES, DOUBLE)
            add(totals.inputs, given)
            add(totals.outputs, backward(model, given))
        assert not residuals(reducer)
    return totals
