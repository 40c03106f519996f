"""Contract 4 on another number of ranks: what is owed to the model stays owed."""

from __future__ import annotations

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, feed, mean, residuals
from saving import SETTINGS, train
from worlds import Rank, run_threads

DOUBLE = torch.float64
changes = pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (2, 1)])


@changes
def test_another_world_size_conserves_the_mean_residual(before: int, after: int) -> None:
    """What is owed is the mean over ranks; after the change it is the same."""
    first = train(before, range(3), dtype=DOUBLE)
    loaded = train(after, range(0), first.state, dtype=DOUBLE).residuals
    for name, owed in mean(first.residuals).items():
        assert owed.any()
        torch.testing.assert_close(mean(loaded)[name], owed, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_what_the_first_world_held_back_comes_out_of_the_second(before: int, after: int) -> None:
    first = train(before, range(3), dtype=DOUBLE)
    owed = mean(first.residuals)

    def body(rank: Rank) -> tuple[Tensors, Tensors]:
        zeros = {n: torch.zeros_like(g) for n, g in feed(0, 0, dtype=DOUBLE).items()}
        came = dict(zeros)
        with compressed(rank, Fed(dtype=DOUBLE), **SETTINGS) as (model, reducer):
            reducer.load_state_dict(first.state)
            for _ in range(4):
                gradients = backward(model, zeros)
                came = {name: total + gradients[name] for name, total in came.items()}
            return came, residuals(reducer)

    ranks = run_threads(body, after)
    still = mean([held for _, held in ranks])
    for name, expected in owed.items():
        came_out = ranks[0][0][name].flatten()
        torch.testing.assert_close(came_out + still[name], expected, rtol=1e-11, atol=1e-14)
        assert still[name].norm() < 1e-3 * expected.norm(), "it must have come out by now"


def test_there_and_back_again() -> None:
    """Two changes of size lose no more than one."""
    first = train(4, range(2), dtype=DOUBLE)
    second = train(3, range(0), first.state, dtype=DOUBLE)
    third = train(4, range(0), second.state, dtype=DOUBLE)
    for name, owed in mean(first.residuals).items():
        torch.testing.assert_close(mean(third.residuals)[name], owed, rtol=1e-14, atol=1e-16)
