"""States of random number generators, and seeds for a purpose."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from lightning_dist.elastic import rng
from lightning_dist.elastic.data.plan import Layout, Position
from lightning_dist.elastic.progress import ElasticState, Generators
from lightning_dist.elastic.rng import derive_seed


def draw() -> list[float]:
    """From every generator of this process, also what they keep for the next call."""
    numbers = [random.random(), random.gauss(0, 1), random.getrandbits(40)]
    numbers += [np.random.rand(), np.random.randn(), float(np.random.randint(10**9))]
    return numbers + torch.rand(3).tolist() + torch.randn(2).tolist()


def test_they_go_on_where_they_were() -> None:
    draw()
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    rng.restore(state)
    assert [draw() for _ in range(3)] == expected


def test_what_is_held_is_put_back_again_and_again() -> None:
    draw()
    put_back = rng.hold()
    expected = [draw() for _ in range(3)]
    for _ in range(2):
        put_back()
        assert [draw() for _ in range(3)] == expected


def test_half_of_a_pair_is_kept() -> None:
    """gauss() and randn() draw two numbers and hand out one."""
    rng.seed_all(3)
    random.gauss(0, 1)
    np.random.randn()
    state = rng.capture()
    expected = random.gauss(0, 1), np.random.randn()
    rng.restore(state)
    assert (random.gauss(0, 1), np.random.randn()) == expected


def test_states_are_read_without_running_code() -> None:
    file = io.BytesIO()
    torch.save(rng.capture(), file)
    expected = draw()
    file.seek(0)
    rng.restore(torch.load(file, weights_only=True))
    assert draw() == expected


def test_one_seed_for_all_of_them() -> None:
    rng.seed_all(2**62 + 5)
    expected = draw()
    draw()
    rng.seed_all(2**62 + 5)
    assert draw() == expected
    rng.seed_all(2**62 + 6)
    assert all(a != b for a, b in zip(draw(), expected, strict=True))


def test_outside_nothing_has_happened() -> None:
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    with rng.isolated(1):
        inside = draw()
    assert draw() == expected
    with rng.isolated(1):
        assert draw() == inside


def test_outside_nothing_has_happened_after_an_error() -> None:
    state = rng.capture()
    expected = draw()
    rng.restore(state)

    def fail() -> None:
        with rng.isolated(1):
            draw()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert draw() == expected


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy = rng.capture()
    monkeypatch.setattr(rng, "np", None)
    state = rng.capture()
    assert "numpy" not in state
    expected = random.random(), torch.rand(1)
    for each in (state, with_numpy):
        rng.restore(each)
        assert (random.random(), torch.rand(1)) == expected
    rng.seed_all(1)


def test_the_state_of_a_machine_with_numpy_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(rng, "np", None)
        state = rng.capture()
    expected = random.random()
    rng.restore(state)
    assert random.random() == expected


def test_a_seed_depends_on_what_it_is_for() -> None:
    purposes = [(0,), (0, "order"), (0, "order", 0), (0, "order", 1), (1, "order", 0)]
    purposes += [(0, "workers", 0), (0, "workers", 1), (0, "order", 10), (0, "order", 1, 0)]
    seeds = {derive_seed(*purpose) for purpose in purposes}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_everywhere() -> None:
    assert derive_seed(0, "order", 0) == 1829853113658518448


@pytest.mark.parametrize(("data_size", "is_same"), [(2, True), (4, False), (1, False)])
def test_ranks_that_share_samples_draw_the_same(data_size: int, is_same: bool) -> None:
    """Four ranks saved two shares; as many go on, whose tensor-parallel groups may be others."""
    layout = Layout.of_script(world_size=2, micro_batch=1, accumulate=1)
    saved = [{"rank": rank} for rank in range(4)]
    state = ElasticState("", 5, layout, layout, Position(), 3, 3, rng=saved)
    found = [
        Generators(
            state,
            rank=rank,
            world_size=4,
            device=torch.device("cpu"),
            data_ranks=(rank * data_size // 4, data_size),
        ).capture()
        for rank in range(4)
    ]
    if is_same:
        assert found == saved
    else:
        assert len({each["seed"] for each in found}) == data_size
