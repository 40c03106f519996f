"""The contracts that every row of the table keeps, in a real DDP, whatever exchange it takes.

Conservation is in ``test_conservation.py``, resumption in ``test_saved_state.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    FEW,
    PER_LEVEL,
    SHAPES,
    Fed,
    backward,
    compressed,
    feed,
    step_digest,
)
from layouts import FORMS, PAIRS, UNEVEN, Layout, flat
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS, resolve_codec

SETTINGS = {"min_compress_numel": 256}


def test_every_row_is_here() -> None:
    assert {resolve_codec(codec).name for codec in EVERY_CODEC} == set(CODECS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_gradients(dtype: torch.dtype) -> None:
    """Models in 16 bits: the gradients arrive and leave in their dtype, replicas agree."""

    def body(rank: Rank) -> list[tuple[str, bool]]:
        found = []
        for codec in EVERY_CODEC:
            with compressed(rank, Fed(dtype=dtype), codec, **SETTINGS) as (model, reducer):
                for step in range(3):
                    gradients = backward(model, feed(rank.rank, step, dtype=dtype))
                assert {g.dtype for g in gradients.values()} == {dtype}
                finite = all(g.isfinite().all() for g in gradients.values())
                reducer.state.load({}, reducer.network.rows)  # residuals differ between ranks
                found.append((step_digest(gradients, reducer), bool(finite)))
        return found

    for codec, first, *others in zip(EVERY_CODEC, *run_threads(body, 3), strict=True):
        assert first[1], codec
        assert others == [first] * 2, codec


ODD = {
    "few": {"one": (1, 1), "square": (9, 9)},  # the second so that there is work for powersgd
    "many": {
        "odd": (7, 3),
        "empty": (0, 5),
        "row": (1, 300),
        "column": (300, 1),
        "deep": (5, 4, 3, 3),
        "zero": (2, 0, 3),
        "scalar": (),
    },
}


@pytest.mark.parametrize("shapes", ODD)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_odd_shapes(shapes: str, size: int) -> None:
    """Sizes 0, 1 and odd, everything compressed; zeros, denormals and huge values among them."""
    of = ODD[shapes]

    def body(rank: Rank) -> None:
        for codec in EVERY_CODEC:
            with compressed(rank, Fed(of), codec, min_compress_numel=0) as (model, _):
                for factor in (1.0, 0.0, 1e-42, 1e30 if is_wide(codec) else 1.0, 1.0):
                    given = {n: g * factor for n, g in feed(rank.rank, 0, of).items()}
                    finite = [g.isfinite().all() for g in backward(model, given).values()]
                    assert all(finite), (codec, factor)

    run_threads(body, size)


def is_wide(codec: str) -> bool:
    """Whether 1e30 fits the wire, and its rank-r or rotated form fits float32."""
    return not codec.startswith("fp16")


@pytest.mark.parametrize(
    ("layout", "codecs"),
    [
        (flat(2), EVERY_CODEC),
        *((layout, [*FEW, *PER_LEVEL]) for layout in FORMS),
        *(
            pytest.param(layout, EVERY_CODEC, marks=pytest.mark.slow)
            for layout in (Layout(PAIRS), Layout(UNEVEN))
        ),
    ],
    ids=lambda value: str(value) * isinstance(value, Layout),
)
def test_zeros_in_are_zeros_out(layout: Layout, codecs: Sequence[str]) -> None:
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def body(rank: Rank) -> None:
        for codec in codecs:
            with compressed(rank, Fed(), codec, **layout.form, **SETTINGS) as (model, _):
                for _ in range(3):
                    gradients = backward(model, zeros)
                    assert not any(bool(g.any()) for g in gradients.values()), codec

    run_threads(body, layout.size)
