"""Contract 2: with error feedback no gradient is lost, only sent later.

sum of outputs + mean residual == sum of mean inputs, and the residual stays bounded. Where hosts
reduce first, a host keeps what its part of the mean has lost.
"""

from __future__ import annotations

import pytest
import torch
from feeding import EVERY_CODEC, SHAPES, feed
from layouts import FORMS, PAIRS, Layout, flat
from torch import Tensor
from totals import DOUBLE, Totals, lost, totals
from worlds import Rank, run_threads

from lightning_dist.codecs import FP16, Codec, Int8, NoCompression, resolve_codec

EVERYTHING = {"min_compress_numel": 0, "error_feedback": True}
LARGE = {"min_compress_numel": 256}
WEIGHT = {"weight": (25, 30)}
# Others keep no residual by default, or (dgc) sum momenta and not gradients.
WITH_RESIDUAL = [c for c in EVERY_CODEC if resolve_codec(c).keeps_residual and "dgc" not in c]

many_steps = pytest.mark.parametrize(
    "steps", [60, pytest.param(1000, marks=pytest.mark.exhaustive)], ids=str
)


@pytest.mark.parametrize("size", [2, 3])
@many_steps
def test_many_steps_conserve_mass_and_bound_the_residual(steps: int, size: int) -> None:
    """Ranks that disagree by a constant, the case in which ``e = p - mean`` grows for ever."""
    codec, tenth = Int8(block_size=256), steps // 10
    ranks = run_threads(
        lambda rank: totals(rank, codec, steps, shapes=WEIGHT, bias=1.0, **EVERYTHING), size
    )
    assert lost(ranks) < 1e-10
    for rank in ranks:
        assert 0 < rank.norms[-1] < 3 * rank.norms[tenth - 1]
    wrong = norms_of_the_difference_from_the_mean(codec, size, steps, WEIGHT["weight"])
    assert wrong[-1] > 5 * wrong[tenth - 1] > 50 * ranks[0].norms[tenth - 1]


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


@pytest.mark.parametrize("layout", [Layout(PAIRS), Layout(PAIRS, leader=True)], ids=str)
@many_steps
def test_many_steps_where_hosts_reduce_first(steps: int, layout: Layout) -> None:
    ranks = run_threads(
        lambda rank: totals(rank, "int8", steps, shapes=WEIGHT, bias=1.0, layout=layout, **LARGE), 4
    )
    assert lost(ranks) < 1e-10
    holders = [rank for rank in ranks if rank.norms[-1]]
    assert len(holders) == (2 if layout.leader else 4)
    for rank in holders:
        assert rank.norms[-1] < 3 * rank.norms[steps // 10 - 1]


@pytest.mark.parametrize(
    "layout", [pytest.param(flat(2), marks=pytest.mark.exhaustive), flat(3), *FORMS], ids=str
)
def test_every_codec_conserves_mass(layout: Layout) -> None:
    """And the residual levels off."""
    steps = 32 if layout.tree is None else 6

    def body(rank: Rank) -> list[Totals]:
        return [totals(rank, codec, steps, layout=layout, **LARGE) for codec in WITH_RESIDUAL]

    for codec, *ranks in zip(WITH_RESIDUAL, *run_threads(body, layout.size), strict=True):
        assert {name for name, of in ranks[0].owed.items() if of.any()} == {"first", "second"}
        # What the payload's own dtype (float32 scales, factors, ring sums) rounds is not a loss.
        assert lost(ranks) < 1e-9 * layout.size, codec
        for rank in ranks if layout.tree is None else ():
            assert 0 < rank.norms[-1] < 1.5 * max(rank.norms[:16]), codec


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_cut_conserves_mass(size: int) -> None:
    """Whole and broken rows and blocks, more ranks than blocks, 1-D and 0-D parameters."""

    def body(rank: Rank) -> list[Totals]:
        return [
            totals(
                rank,
                Int8(block),
                5,
                shapes={**SHAPES, "scalar": (), "one": (1,), "block": (block,)},
                **EVERYTHING,
            )
            for block in (16, 256, 4096)
        ]

    for ranks in zip(*run_threads(body, size), strict=True):
        assert lost(ranks) < 1e-12
        assert all(rank.norms[-1] > 0 for rank in ranks)


@pytest.mark.parametrize("size", [2, 4])
def test_linear_codecs_lose_only_what_the_network_rounds(size: int) -> None:
    """The residual holds what the cast lost; sums inside the ring are rounded on their way."""

    def body(rank: Rank) -> tuple[Totals, Totals]:
        cast = totals(rank, FP16(), 12, **EVERYTHING)
        return cast, totals(rank, NoCompression(), 12)

    cast, plain = zip(*run_threads(body, size), strict=True)
    assert 0 < lost(cast) < 2 * 2.0**-11
    assert lost(plain) < 1e-12
    assert not any(any(rank.norms) for rank in plain)
