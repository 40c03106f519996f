"""Contract 2: with error feedback no gradient is lost, only sent later.

sum of outputs + mean residual == sum of mean inputs, and the residual stays bounded. Where hosts
reduce first, a host keeps what its part of the mean has lost.
"""

from __future__ import annotations

import pytest
from feeding import EVERY_CODEC, SHAPES
from layouts import FORMS, PAIRS, Layout, flat
from threads import of_all, on_threads
from totals import lost, totals
from worlds import Rank

from lightning_dist.codecs import FP16, Int8, NoCompression, resolve_codec

EVERYTHING = {"min_compress_numel": 0, "error_feedback": True}
LARGE = {"min_compress_numel": 256}
WEIGHT = {"weight": (25, 30)}
# Others keep no residual by default, or (dgc) sum momenta and not gradients.
WITH_RESIDUAL = [c for c in EVERY_CODEC if resolve_codec(c).keeps_residual and "dgc" not in c]


@pytest.mark.parametrize(
    "layout", [flat(2), flat(3), Layout(PAIRS), Layout(PAIRS, leader=True)], ids=str
)
@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.exhaustive)], ids=str)
@on_threads("layout")
def test_many_steps_conserve_mass_and_bound_the_residual(
    rank: Rank, steps: int, layout: Layout
) -> None:
    """Ranks that disagree by a constant, the case in which ``e = p - mean`` grows for ever."""
    settings = {**EVERYTHING, "shapes": WEIGHT, "bias": 1.0, "layout": layout}
    ranks = of_all(rank, totals(rank, Int8(), steps, **settings))
    assert lost(ranks) < 1e-10
    holders = [each for each in ranks if each.norms[-1]]
    assert len(holders) == (2 if layout.leader else layout.size)
    for each in holders:
        assert each.norms[-1] < 3 * each.norms[steps // 10 - 1]


@pytest.mark.parametrize(
    "layout", [pytest.param(flat(2), marks=pytest.mark.exhaustive), flat(3), *FORMS], ids=str
)
@on_threads("layout")
def test_every_codec_conserves_mass(rank: Rank, layout: Layout) -> None:
    """And the residual levels off."""
    for codec in WITH_RESIDUAL:
        steps = 32 if layout.tree is None else 6
        ranks = of_all(rank, totals(rank, codec, steps, layout=layout, **LARGE))
        assert {name for name, of in ranks[0].owed.items() if of.any()} == {"first", "second"}
        # What the payload's own dtype (float32 scales, factors, ring sums) rounds is not a loss.
        assert lost(ranks) < 1e-9 * layout.size, codec
        if layout.tree is None:
            norms = ranks[rank.rank].norms
            assert 0 < norms[-1] < 1.5 * max(norms[:16]), codec


@pytest.mark.parametrize("size", [2, 3, 4])
@on_threads("size")
def test_every_cut_conserves_mass(rank: Rank, size: int) -> None:
    """Whole and broken rows and blocks, more ranks than blocks, 1-D and 0-D parameters."""
    for block in (16, 256, 4096):
        shapes = {**SHAPES, "scalar": (), "one": (1,), "block": (block,)}
        own = totals(rank, Int8(block), 5, shapes=shapes, **EVERYTHING)
        assert own.norms[-1] > 0
        assert lost(of_all(rank, own)) < 1e-12


@pytest.mark.parametrize("size", [2, 4])
@on_threads("size")
def test_linear_codecs_lose_only_what_the_network_rounds(rank: Rank, size: int) -> None:
    """The residual holds what the cast lost; sums inside the ring are rounded on their way."""
    cast = of_all(rank, totals(rank, FP16(), 12, **EVERYTHING))
    plain = of_all(rank, totals(rank, NoCompression(), 12))
    assert 0 < lost(cast) < 2 * 2.0**-11
    assert lost(plain) < 1e-12
    assert not any(plain[rank.rank].norms)
