"""Contract 4 where hosts reduce first: state by host, in a checkpoint and on other layouts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    PER_LEVEL,
    SHAPES,
    Fed,
    Shapes,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    step_digest,
)
from layouts import NESTED, PAIRS, UNEVEN, Layout, Tree, every_case
from saving import SETTINGS, State, through_a_file, train
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.codecs import resolve_codec
from lightning_dist.reducer.reducer import Reducer

DOUBLE = torch.float64
LAYOUTS = [Layout(PAIRS), Layout(PAIRS, leader=True), Layout(UNEVEN)]
KEEP = [*(c for c in EVERY_CODEC if resolve_codec(c).keeps_residual), *PER_LEVEL]
KEEP_OF = [KEEP, ["int8", *PER_LEVEL], KEEP]  # uneven hosts are in the leader form
every = every_case(LAYOUTS, KEEP_OF)


def tensors(state: State) -> dict[str, list[str]]:
    """Digest of every tensor in a state, by kind and name."""

    def digests(of: Any) -> list[str]:
        return [digest([part]) for part in ([of] if isinstance(of, Tensor) else of)]

    kinds = [kind for kind, value in state.items() if isinstance(value, Mapping)]
    return {f"{kind} {name}": digests(of) for kind in kinds for name, of in state[kind].items()}


SMALL_TOO = {"one": (40,), "two": (24,), "weight": (40, 48), "three": (7,), "four": (300,)}
"""Small neighbours, which a codec of blocks inside a host must not mix."""


class Resumed:
    """A run of four steps and one resumed after two of them."""

    def __init__(
        self,
        rank: Rank,
        layout: Layout,
        codec: str,
        saved: dict[str, State],
        shapes: Shapes = SHAPES,
    ) -> None:
        settings = {**SETTINGS, "tree": layout.tree, "leader": layout.leader}
        with compressed(rank, Fed(shapes), codec, **settings) as (model, reducer):
            for step in range(2):
                backward(model, feed(rank.rank, step, shapes))
            self.state = reducer.state_dict()
            self.whole = later(rank, model, reducer, shapes)
        if self.state is not None:
            saved[codec] = through_a_file(self.state)
        rank.barrier.wait()
        with compressed(rank, Fed(shapes), codec, **settings) as (model, reducer):
            reducer.load_state_dict(saved[codec])
            self.again = reducer.state_dict()
            self.resumed = later(rank, model, reducer, shapes)


def later(
    rank: Rank, model: DistributedDataParallel, reducer: Reducer, shapes: Shapes
) -> tuple[list[str], dict[str, list[str]]]:
    """Digests of all that two steps leave on this rank, and of the state of all ranks."""
    digests = [step_digest(backward(model, feed(rank.rank, s, shapes)), reducer) for s in (2, 3)]
    return digests, tensors(reducer.state_dict() or {})


@cache
def world(number: int) -> dict[str, list[Resumed]]:
    saved: dict[str, State] = {}

    def body(rank: Rank) -> list[Resumed]:
        return [Resumed(rank, LAYOUTS[number], codec, saved) for codec in KEEP_OF[number]]

    of_codecs = zip(*run_threads(body, LAYOUTS[number].size), strict=True)
    return {codec: list(ranks) for codec, ranks in zip(KEEP_OF[number], of_codecs, strict=True)}


@every
def test_a_resumed_run_equals_the_uninterrupted_one(number: int, codec: str) -> None:
    """Every bit of gradients and state, and the state that it saves at its end."""
    for ran in world(number)[codec]:
        assert ran.resumed == ran.whole


@every
def test_a_state_saved_right_after_it_was_loaded_is_the_same(number: int, codec: str) -> None:
    """One row per host, momenta and factors too; rank 0 alone has it."""
    first, *others = world(number)[codec]
    assert all(ran.state is None and ran.again is None for ran in others)
    assert first.state is not None
    assert first.again is not None
    assert first.again.keys() == first.state.keys()
    assert ("factors" in first.state) == codec.startswith("powersgd")
    assert ("momenta" in first.state) == codec.startswith("dgc")
    assert tensors(first.again) == tensors(first.state)
    assert (first.again["step"], first.again["world_size"]) == (2, 4)
    for name in ("first", "second"):
        rows = first.state["residuals"][name]
        assert rows.shape == (2, torch.Size(SHAPES[name]).numel())
        assert all(row.any() for row in rows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_small_neighbours_resume_bit_for_bit(layout: Layout) -> None:
    """DDP joins other neighbours after its first backward, so blocks must not span them."""
    saved: dict[str, State] = {}

    def body(rank: Rank) -> bool:
        ran = Resumed(rank, layout, PER_LEVEL[0], saved, SMALL_TOO)
        return ran.resumed == ran.whole

    assert run_threads(body, layout.size) == [True] * layout.size


TRIPLES: Tree = [[0, 1, 2], [3, 4, 5]]
CHANGES = [
    (4, None, 4, PAIRS),
    (4, PAIRS, 4, None),
    (4, PAIRS, 4, UNEVEN),
    (4, PAIRS, 6, TRIPLES),
    (4, PAIRS, 2, None),
    (4, UNEVEN, 4, PAIRS),
    (8, NESTED, 3, None),
    (6, TRIPLES, 8, NESTED),
]


def mean_of_rows(state: State) -> Tensors:
    return {name: rows.mean(0) for name, rows in state["residuals"].items()}


@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2"])
@pytest.mark.parametrize(("size", "tree", "new_size", "new_tree"), CHANGES, ids=str)
def test_another_layout_conserves_what_is_owed(
    size: int, tree: Tree | None, new_size: int, new_tree: Tree | None, codec: str
) -> None:
    """The mean over rows stays; then it comes out, or is held still, of steps without gradients."""
    first = train(size, range(3), dtype=DOUBLE, tree=tree, codec=codec).state
    owed = mean_of_rows(first)
    loaded = train(new_size, range(0), first, dtype=DOUBLE, tree=new_tree, codec=codec).state
    assert loaded["world_size"] == new_size
    for name, residual in owed.items():
        assert residual.any()
        found = mean_of_rows(loaded)[name]
        torch.testing.assert_close(found, residual, rtol=1e-14, atol=1e-16)
    zeros = {n: torch.zeros_like(g) for n, g in feed(0, 0, dtype=DOUBLE).items()}

    def body(rank: Rank) -> tuple[Tensors, State | None]:
        came = dict(zeros)
        settings = {**SETTINGS, "tree": new_tree}
        with compressed(rank, Fed(dtype=DOUBLE), codec, **settings) as (model, reducer):
            reducer.load_state_dict(first)
            for _ in range(2):
                gradients = backward(model, zeros)
                came = {name: total + gradients[name] for name, total in came.items()}
            return came, reducer.state_dict()

    came, still = run_threads(body, new_size)[0]
    assert still is not None
    for name, expected in owed.items():
        total = came[name].flatten() + mean_of_rows(still)[name]
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
