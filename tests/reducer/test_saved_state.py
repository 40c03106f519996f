"""Contract 4: state in a checkpoint, of all ranks, by parameter name."""

from __future__ import annotations

import pytest
import torch
from feeding import Fed, backward, compressed, feed
from saving import SETTINGS, train
from worlds import Rank, run_threads


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(size: int) -> None:
    whole = train(size, range(4))
    resumed = train(size, range(2, 4), train(size, range(2)).state)
    assert resumed.digests == [digests[2:] for digests in whole.digests]
    afresh = train(size, range(2, 3))
    assert afresh.digests[0][0] != resumed.digests[0][0], "else residuals do not matter"


def test_the_state_is_plain_and_of_all_ranks() -> None:
    trained = train(3, range(2))
    state = trained.state
    residuals = state["residuals"]
    assert state == {
        "version": 1,
        "world_size": 3,
        "step": 2,
        "strides": {},
        "residuals": residuals,
    }
    assert set(residuals) == {"first", "second"}
    for name, rows in residuals.items():
        assert torch.equal(rows, torch.stack([held[name] for held in trained.residuals]))
        assert all(row.any() for row in rows)


def test_none_starts_afresh() -> None:
    """A checkpoint of plain DDP has no state: as if nothing had been trained before."""
    assert train(2, range(3), None, before=range(50, 53)).digests == train(2, range(3)).digests


def test_loading_replaces_what_was_held() -> None:
    """A reducer that has run before continues from the state alone."""
    state = train(2, range(3)).state
    expected = train(2, range(3, 5), state)
    assert train(2, range(3, 5), state, before=range(50, 53)).digests == expected.digests


def test_the_start_step_is_counted_over_a_restart() -> None:
    """Compression that starts at step 4 starts at step 4, not 4 steps after the restart."""
    first = train(2, range(3), start_step=4)
    assert first.residuals == [{}, {}]
    assert train(2, range(3, 4), first.state, start_step=4).residuals == [{}, {}]
    later = train(2, range(3, 5), first.state, start_step=4)
    assert [set(held) for held in later.residuals] == [{"first", "second"}] * 2


def test_a_state_of_another_version_is_refused() -> None:
    def body(rank: Rank) -> None:
        with compressed(rank, Fed()) as (_, reducer):
            with pytest.raises(ValueError, match="must be of version 1, got 7; it was written by"):
                reducer.load_state_dict({"version": 7, "residuals": {}})
            with pytest.raises(ValueError, match="must be of version 1, got None"):
                reducer.load_state_dict({})

    run_threads(body, 2)


def test_a_state_of_another_model_is_refused_in_the_next_step() -> None:
    def body(rank: Rank) -> None:
        with compressed(rank, Fed(), **SETTINGS) as (model, reducer):
            wrong = {"first": torch.zeros(2, 9)}
            reducer.load_state_dict({"version": 1, "step": 1, "residuals": wrong})
            with pytest.raises(RuntimeError, match="'first' has 9 elements, the parameter 1920"):
                backward(model, feed(rank.rank, 0))

    run_threads(body, 2)
