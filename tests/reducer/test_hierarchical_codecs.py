"""Every codec between hosts, in both forms: what a step leaves is equal, repeats, and is finite."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    PER_LEVEL,
    SHAPES,
    Fed,
    backward,
    compressed,
    digest,
    feed,
    step_digest,
)
from layouts import FORMS as LAYOUTS
from layouts import Layout, every_case
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS, BlockCodec, Int8, resolve_codec

SETTINGS = {"min_compress_numel": 256}
FEW = ["none", "int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2", "qsgd:block_size=64"]
ALL, SOME = [*EVERY_CODEC, *PER_LEVEL], [*FEW, *PER_LEVEL]
CODECS_OF = [ALL, SOME, ALL, SOME]  # uneven hosts are in the leader form
every = every_case(LAYOUTS, CODECS_OF)
INSIDE = ("none", "fp16", "bf16", "int8", "int4", "fp8", "sign")


def steps(rank: Rank, layout: Layout, codec: Any) -> list[tuple[str, str]]:
    """Digests of three steps: of the gradients, and of all that this rank has afterwards."""
    form = {"tree": layout.tree, "leader": layout.leader}
    digests = []
    with compressed(rank, Fed(), codec, **form, **SETTINGS) as (model, reducer):
        for step in range(3):
            gradients = backward(model, feed(rank.rank, step))
            assert all(g.isfinite().all() for g in gradients.values())
            of_names = [gradients[name] for name in sorted(gradients)]
            digests.append((digest(of_names), step_digest(gradients, reducer)))
    return digests


def zeros(rank: Rank, layout: Layout, codec: Any) -> bool:
    """Whether anything but zeros comes out of three steps of zeros."""
    form = {"tree": layout.tree, "leader": layout.leader}
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with compressed(rank, Fed(), codec, **form, **SETTINGS) as (model, _):
        found = [backward(model, nothing) for _ in range(3)]
    return any(bool(g.any()) for gradients in found for g in gradients.values())


Runs = tuple[list[tuple[str, str]], list[tuple[str, str]], bool]


@cache
def world(number: int) -> dict[str, list[Runs]]:
    """``{codec: [rank]}``: two runs of layout ``number``, and whether zeros were not zeros."""
    layout, codecs = LAYOUTS[number], CODECS_OF[number]

    def body(rank: Rank) -> list[Runs]:
        return [
            (steps(rank, layout, c), steps(rank, layout, c), zeros(rank, layout, c)) for c in codecs
        ]

    of_codecs = zip(*run_threads(body, layout.size), strict=True)
    return {codec: list(ranks) for codec, ranks in zip(codecs, of_codecs, strict=True)}


@every
def test_replicas_are_equal_and_runs_repeat(number: int, codec: str) -> None:
    """After every step all ranks have the same bits; a second run has those of the first."""
    ranks = world(number)[codec]
    for first, second, not_zero in ranks:
        assert first == second
        assert not not_zero
        assert [gradients for gradients, _ in first] == [g for g, _ in ranks[0][0]]
        assert len({gradients for gradients, _ in first}) == 3


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_other_dtypes(dtype: torch.dtype, layout: Layout) -> None:
    """They arrive and leave in their dtype; replicas agree, the small tensor has the mean."""
    form = {"tree": layout.tree, "leader": layout.leader}

    def body(rank: Rank) -> list[tuple[str, float]]:
        found = []
        for codec in EVERY_CODEC:
            with compressed(rank, Fed(dtype=dtype), codec, **form, **SETTINGS) as (model, _):
                for step in range(2):
                    gradients = backward(model, feed(rank.rank, step, dtype=dtype))
            assert {g.dtype for g in gradients.values()} == {dtype}
            bias = sum(feed(r, 1, dtype=dtype)["bias"].double() for r in range(4)) / 4
            error = (gradients["bias"].double() - bias).norm() / bias.norm()
            found.append((digest([gradients[name] for name in SHAPES]), float(error)))
        return found

    first, *others = run_threads(body, 4)
    assert others == [first] * 3
    for (_, error), codec in zip(first, EVERY_CODEC, strict=True):
        assert error < 2, codec
        if resolve_codec(codec).min_numel and not codec.startswith("dgc"):  # else compressed too
            assert error < 4 * max(torch.finfo(dtype).eps, 2e-7), codec


def test_the_codecs_inside_are_all_that_fit() -> None:
    kinds = [resolve_codec(name) for name in CODECS]
    fit = {c.name for c in kinds if isinstance(c, BlockCodec) and c.exchange != "gather"}
    assert set(INSIDE) == {name for name in fit if not resolve_codec(name).stochastic}


def largest_error(codec: BlockCodec, amax: float) -> float:
    """Of gradients of at most ``amax``."""
    if codec.name == "sign":
        return 2 * amax  # everything becomes one size
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
            form = {"tree": layout.tree, "leader": layout.leader}
            with compressed(rank, Fed(), codec, **form, min_compress_numel=0) as (model, _):
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
            if intra in ("none", "fp16", "bf16"):
                assert error > across / 10, "int8 has rounded between the hosts"
