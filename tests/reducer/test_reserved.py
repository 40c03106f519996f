"""Residuals are there before the first backward pass, whose peak of memory they would add to."""

from __future__ import annotations

from typing import Any

import pytest
from feeding import Fed, backward, compressed, digest, feed, held, residuals
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, flat
from worlds import Rank, run_threads

CODECS = ["int8", "dgc:ratio=0.1,block_size=128", "threshold:tau=1.5", "qsgd:block_size=64"]


@pytest.mark.parametrize(
    "layout",
    [
        flat(2),
        flat(3),
        Layout(PAIRS),
        Layout(UNEVEN),
        pytest.param(Layout(HOSTS_OF_FOUR), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_first_step_allocates_no_residual(layout: Layout) -> None:
    def body(rank: Rank) -> None:
        for codec in CODECS:
            with compressed(rank, Fed(), codec, min_compress_numel=0, **layout.form) as (m, red):
                before = {name: of.shape for name, of in residuals(red).items()}
                nbytes = red.memory()["residual_bytes"]
                backward(m, feed(rank.rank, 0))
                assert {name: of.shape for name, of in residuals(red).items()} == before
                assert red.memory()["residual_bytes"] == nbytes
                assert bool(before) is not codec.startswith("qsgd")

    run_threads(body, layout.size)


def test_those_of_later_phases_wait_for_them() -> None:
    def body(rank: Rank) -> list[int]:
        found = []
        with compressed(rank, Fed(), min_compress_numel=0, start_step=1) as (model, reducer):
            for step in range(2):
                found.append(reducer.memory()["residual_bytes"])
                backward(model, feed(rank.rank, step))
            found.append(reducer.memory()["residual_bytes"])
            return found

    for before, compressing, after in run_threads(body, 2):
        assert before == compressing == 0 < after


@pytest.mark.parametrize("layout", [flat(2), Layout(PAIRS)], ids=str)
def test_a_state_that_is_loaded_is_in_its_place(layout: Layout) -> None:
    settings: dict[str, Any] = {"min_compress_numel": 0, **layout.form}

    def body(rank: Rank) -> None:
        with compressed(rank, Fed(), **settings) as (model, reducer):
            backward(model, feed(rank.rank, 0))
            state = reducer.state_dict()
            kept, nbytes = digest(held(reducer)), reducer.memory()["residual_bytes"]
        if state is not None:
            states.append(state)
        rank.barrier.wait()
        with compressed(rank, Fed(), **settings) as (model, reducer):
            reducer.load_state_dict(states[0])
            assert reducer.memory()["residual_bytes"] == nbytes
            assert digest(held(reducer)) == kept

    states: list[Any] = []
    run_threads(body, layout.size)
