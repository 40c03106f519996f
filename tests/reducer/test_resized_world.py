"""Contract 4 on another number of ranks or another layout: what is owed stays owed."""

from __future__ import annotations

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, feed
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, Tree, flat
from saving import SETTINGS, State, through_a_file, train_here
from worlds import Rank, run_threads

DOUBLE = torch.float64
TRIPLES: Tree = [[0, 1, 2], [3, 4, 5]]
CHANGES = [
    (flat(4), flat(2)),
    (flat(2), flat(3)),
    (flat(2), flat(1)),
    (flat(4), Layout(PAIRS)),
    (Layout(PAIRS), flat(4)),
    (Layout(PAIRS), Layout(UNEVEN)),
    (Layout(PAIRS), Layout(TRIPLES)),
    (Layout(PAIRS), flat(2)),
    (Layout(UNEVEN), Layout(PAIRS)),
    (Layout(HOSTS_OF_FOUR), flat(3)),
    (Layout(TRIPLES), Layout(HOSTS_OF_FOUR)),
]
CODECS = ("int8", "powersgd:rank=2")


def mean_of_rows(state: State) -> Tensors:
    return {name: rows.mean(0) for name, rows in state["residuals"].items()}


def left_by(layout: Layout, codec: str, steps: int, state: State | None = None) -> State:
    """State after so many steps on this layout, from ``state`` on."""

    def body(rank: Rank) -> State | None:
        settings = {"dtype": DOUBLE, "codec": codec, **layout.form}
        return train_here(rank, range(steps), state, **settings)[2]

    found = run_threads(body, layout.size)[0]
    assert found is not None
    return through_a_file(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [*CHANGES[:6], *(pytest.param(*each, marks=pytest.mark.slow) for each in CHANGES[6:])],
    ids=str,
)
@pytest.mark.parametrize("codec", CODECS)
def test_another_layout_conserves_the_residual(before: Layout, after: Layout, codec: str) -> None:
    """The mean over rows stays; then it comes out, or is held still, of steps without gradients."""
    first = left_by(before, codec, 3)
    owed = mean_of_rows(first)
    zeros = {n: torch.zeros_like(g) for n, g in feed(0, 0, dtype=DOUBLE).items()}

    def body(rank: Rank) -> tuple[State | None, Tensors, State | None]:
        came = dict(zeros)
        settings = {**SETTINGS, **after.form}
        with compressed(rank, Fed(dtype=DOUBLE), codec, **settings) as (model, reducer):
            reducer.load_state_dict(first)
            loaded = reducer.state_dict()
            for _ in range(4):
                gradients = backward(model, zeros)
                came = {name: total + gradients[name] for name, total in came.items()}
            return loaded, came, reducer.state_dict()

    loaded, came, still = run_threads(body, after.size)[0]
    assert loaded is not None
    assert still is not None
    assert loaded["world_size"] == after.size
    for name, expected in owed.items():
        assert expected.any()
        found = mean_of_rows(loaded)[name]
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-16)
        held = mean_of_rows(still).get(name, torch.zeros(1))
        total = came[name].flatten() + held
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
        if codec == "int8" and after.tree is None and after.size > 1:
            torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-14)
            assert held.norm() < 1e-3 * expected.norm(), "it must have come out by now"


def test_there_and_back_again() -> None:
    """Two changes of size lose no more than one."""
    first = left_by(flat(4), "int8", 2)
    third = left_by(flat(4), "int8", 0, left_by(flat(3), "int8", 0, first))
    for name, owed in mean_of_rows(first).items():
        torch.testing.assert_close(mean_of_rows(third)[name], owed, rtol=1e-14, atol=1e-16)
