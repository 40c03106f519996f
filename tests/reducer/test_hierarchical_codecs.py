"""Every codec between hosts, in both forms, in every dtype, and codecs inside of hosts.

That what a step leaves is equal and repeats is in ``test_nonfinite.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from feeding import EVERY_CODEC, FEW, SHAPES, Fed, backward, compressed, digest, feed
from layouts import FORMS as LAYOUTS
from layouts import Layout
from worlds import Rank, run_threads

from lightning_dist.codecs import BlockCodec, Int8, resolve_codec

SETTINGS = {"min_compress_numel": 256}
INSIDE = ("none", "fp16", "bf16")
SHORT = (torch.float16, torch.bfloat16)
DTYPES = [
    *((dtype, LAYOUTS[0], EVERY_CODEC) for dtype in SHORT),
    *((dtype, LAYOUTS[1], FEW) for dtype in SHORT),
    *((torch.float64, layout, FEW) for layout in LAYOUTS[:2]),
    *(
        pytest.param(dtype, layout, EVERY_CODEC, marks=pytest.mark.slow)
        for layout in LAYOUTS[:2]
        for dtype in (*SHORT, torch.float64)
        if layout.leader or dtype == torch.float64
    ),
]


@pytest.mark.parametrize(("dtype", "layout", "codecs"), DTYPES, ids=str)
def test_gradients_of_other_dtypes(
    dtype: torch.dtype, layout: Layout, codecs: Sequence[str]
) -> None:
    """They arrive and leave in their dtype; replicas agree, the small tensor has the mean."""

    def body(rank: Rank) -> list[tuple[str, float]]:
        found = []
        for codec in codecs:
            with compressed(rank, Fed(dtype=dtype), codec, **layout.form, **SETTINGS) as (model, _):
                for step in range(2):
                    gradients = backward(model, feed(rank.rank, step, dtype=dtype))
            assert {g.dtype for g in gradients.values()} == {dtype}
            bias = sum(feed(r, 1, dtype=dtype)["bias"].double() for r in range(4)) / 4
            error = (gradients["bias"].double() - bias).norm() / bias.norm()
            found.append((digest([gradients[name] for name in SHAPES]), float(error)))
        return found

    first, *others = run_threads(body, 4)
    assert others == [first] * 3
    for (_, error), codec in zip(first, codecs, strict=True):
        assert error < 2, codec
        if resolve_codec(codec).min_numel and not codec.startswith("dgc"):  # else compressed too
            assert error < 4 * max(torch.finfo(dtype).eps, 2e-7), codec


def largest_error(codec: BlockCodec, amax: float) -> float:
    """Of gradients of at most ``amax``."""
    return float(codec.error_bound(torch.full((1, codec.block), amax)).max())


@pytest.mark.parametrize("intra", INSIDE)
def test_a_codec_inside_is_within_its_error_bound(intra: str) -> None:
    """Rounded on the way in, between hosts and on the way out; inside nothing is kept of it."""
    given = [feed(rank, 0) for rank in range(4)]
    inside = resolve_codec(intra)
    assert isinstance(inside, BlockCodec)

    def body(rank: Rank) -> list[dict[str, torch.Tensor]]:
        found = []
        codec = {"intra": intra, "inter": "int8"}
        for layout in LAYOUTS[:3]:
            with compressed(rank, Fed(), codec, **layout.form, min_compress_numel=0) as (model, _):
                found.append(backward(model, given[rank.rank]))
        return found

    ranks = run_threads(body, 4)
    for number, layout in enumerate(LAYOUTS[:3]):
        assert len({digest([r[number][name] for name in SHAPES]) for r in ranks}) == 1, layout
        for name in SHAPES:
            amax = max(float(g[name].abs().max()) for g in given)
            weight = 1 if len(set(map(len, layout.tree))) == 1 else 2 * 3 / 4
            up = largest_error(inside, amax) * weight
            across = largest_error(Int8(), amax * weight + up)
            down = largest_error(inside, amax + up + across)
            mean = sum(g[name].double() for g in given) / 4
            error = float((ranks[0][number][name].double() - mean).abs().max())
            assert error <= (up + across + down) * (1 + 1e-5) + 1e-6, (str(layout), name)
            assert error > across / 10, "int8 has rounded between the hosts"
