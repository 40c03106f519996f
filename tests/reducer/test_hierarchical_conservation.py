"""Contract 2 where hosts reduce first: a host keeps what its part of the mean has lost.

sum of outputs + mean of the hosts' residuals == sum of mean inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from feeding import EVERY_CODEC, SHAPES, Fed, Tensors, backward, compressed, feed, residuals
from layouts import NESTED, PAIRS, UNEVEN, Layout
from test_conservation import Totals as Sums
from test_conservation import add, lost, norm
from worlds import Rank, run_threads

from lightning_dist.codecs import resolve_codec

DOUBLE = torch.float64
# Others keep no residual by default, or (dgc) sum momenta and not gradients.
WITH_RESIDUAL = [c for c in EVERY_CODEC if resolve_codec(c).keeps_residual and "dgc" not in c]
SMALL = {"weight": (25, 30)}


def run(
    rank: Rank, layout: Layout, codec: str, steps: int, shapes: Mapping[str, Any], bias: float = 0.0
) -> Sums:
    """``residual`` is the mean over the rows of the gathered state; ``bias`` sets ranks apart."""
    sums = Sums({}, {}, {}, [])
    form = {"tree": layout.tree, "leader": layout.leader, "min_compress_numel": 256}
    with compressed(rank, Fed(shapes, DOUBLE), codec, **form) as (model, reducer):
        for step in range(steps):
            given = feed(rank.rank, step, shapes, DOUBLE)
            given = {name: value + bias * rank.rank for name, value in given.items()}
            add(sums.inputs, given)
            add(sums.outputs, backward(model, given))
            if step % 100 == 99 or step == steps - 1:
                sums.norms.append(norm(residuals(reducer)))
        state = reducer.state_dict()
    zeros = {name: torch.zeros(shape, dtype=DOUBLE) for name, shape in shapes.items()}
    rows: Tensors = {} if state is None else state["residuals"]
    # `lost` takes the mean over ranks: rank 0 alone has the state.
    held = {n: of.mean(0).view(shapes[n]) * rank.size for n, of in rows.items()}
    sums.residual = {**zeros, **held}
    return sums


@pytest.mark.parametrize(
    ("layout", "steps"), [(Layout(PAIRS), 1000), (Layout(PAIRS, leader=True), 300)], ids=str
)
def test_many_steps_conserve_mass_and_bound_the_residual(layout: Layout, steps: int) -> None:
    """Ranks that disagree by a constant."""
    ranks = run_threads(lambda rank: run(rank, layout, "int8", steps, SMALL, bias=1.0), 4)
    assert lost(ranks) < 1e-10
    holders = [rank for rank in ranks if rank.norms[-1]]
    assert len(holders) == (2 if layout.leader else 4)
    for rank in holders:
        assert rank.norms[-1] < 3 * rank.norms[0]


@pytest.mark.parametrize(
    "layout",
    [Layout(PAIRS), Layout(PAIRS, leader=True), Layout(UNEVEN), Layout(NESTED)],
    ids=str,
)
def test_every_codec_conserves_mass(layout: Layout) -> None:
    codecs = WITH_RESIDUAL if layout.size == 4 else ["int8", "topk:ratio=0.1,block_size=128"]

    def body(rank: Rank) -> list[Sums]:
        return [run(rank, layout, codec, 12, SHAPES) for codec in codecs]

    for codec, *ranks in zip(codecs, *run_threads(body, layout.size), strict=True):
        # Payloads' own dtypes (float32 factors, scales) round, which is not a loss.
        assert lost(ranks) < 1e-9 * layout.size, codec
        assert all(ranks[0].residual[name].any() for name in ("first", "second")), codec
