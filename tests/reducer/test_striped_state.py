"""State left on its ranks is, put together, the state that is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feeding import Fed, backward, compressed, digest, feed
from layouts import PAIRS, UNEVEN, Layout, flat
from saving import SETTINGS, State, through_a_file
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.reducer.parts import Stripes
from lightning_dist.reducer.reducer import Reducer

LAYOUTS = [flat(3), Layout(PAIRS), Layout(PAIRS, leader=True), Layout(UNEVEN)]
CODECS = ["none", "int8", "dgc:ratio=0.1,block_size=128", "powersgd:rank=2"]

Striped = tuple[dict[str, Any], list[Stripes]]
Seen = tuple[State | None, Striped]


def world(layout: Layout) -> list[dict[str, list[Seen]]]:
    """By rank and codec: gathered and striped state before a step, after two, and just loaded."""
    saved: dict[str, State] = {}

    def states(reducer: Reducer) -> Seen:
        gathered = reducer.state_dict()
        return gathered and through_a_file(gathered), copied(reducer.striped_state_dict())

    def body(rank: Rank) -> dict[str, list[Seen]]:
        return {codec: in_turn(rank, codec) for codec in CODECS}

    def in_turn(rank: Rank, codec: str) -> list[Seen]:
        with compressed(rank, Fed(), codec, **SETTINGS, **layout.form) as (model, reducer):
            found = [states(reducer)]
            for step in range(2):
                backward(model, feed(rank.rank, step))
            found.append(states(reducer))
            if found[-1][0] is not None:
                saved[codec] = found[-1][0]
            rank.barrier.wait()
            reducer.load_state_dict(saved[codec])
            return [*found, states(reducer)]

    return run_threads(body, layout.size)


def copied(striped: Striped) -> Striped:
    state, stripes = striped
    return state, [
        Stripes(each.whole, tuple((start, part.clone()) for start, part in each.own))
        for each in stripes
    ]


def joined(of_ranks: list[Striped]) -> dict[str, Any]:
    """The state of rank 0 with the stripes of all ranks where they belong."""
    state, first = of_ranks[0]
    for index, stripes in enumerate(first):
        flat = stripes.whole.flatten()
        flat.zero_()
        taken = torch.zeros_like(flat, dtype=torch.bool)
        for _, of_rank in of_ranks:
            for start, part in of_rank[index].own:
                assert not taken[start : start + part.numel()].any(), "two ranks have the same"
                taken[start : start + part.numel()] = True
                flat[start : start + part.numel()] = part
        stripes.whole.copy_(flat.view_as(stripes.whole))
    return state


def flattened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), digest([value])
    if isinstance(value, dict):
        return {key: flattened(each) for key, each in value.items()}
    return [flattened(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stripes_of_all_ranks_are_the_gathered_state(layout: Layout) -> None:
    """Before a step, after two and just loaded; every rank describes the same tensors."""
    ranks = world(layout)
    for codec in CODECS:
        described = [
            [(each.whole.shape, each.whole.dtype) for each in of_rank[codec][1][1][1]]
            for of_rank in ranks
        ]
        assert all(of_rank == described[0] for of_rank in described), codec
        for moment in range(3):
            seen = [of_rank[codec][moment] for of_rank in ranks]
            gathered = seen[0][0]
            together = joined([striped for _, striped in seen])
            assert flattened(together) == flattened(gathered), (codec, moment)
            if moment and codec == "int8":
                assert any(part.abs().sum() > 0 for part in gathered["residuals"].values())
