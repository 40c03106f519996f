"""Groups of ranks: what is refused, and the levels in which they reduce."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dist.topology.groups import (
    Hosts,
    blocks_of,
    hosts_of,
    levels_of,
    require_cover,
    rows_of,
)

EVEN = ((0, 1), (2, 3))
UNEVEN = ((0, 1, 2), (3,))


@st.composite
def hosts(draw: st.DrawFn) -> Hosts:
    """1 to 4 hosts of 1 to 4 ranks, in any order; half of them even."""
    count, even = draw(st.integers(1, 4)), draw(st.booleans())
    first = draw(st.integers(1, 4))
    sizes = [first if even else draw(st.integers(1, 4)) for _ in range(count)]
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)


every_form = given(hosts(), st.booleans())


@every_form
@example(((3, 0), (1, 2)), False)
@example(UNEVEN, False)
def test_the_weights_give_the_mean(of: Hosts, leader: bool) -> None:
    """Whoever goes on between hosts has the mean of all ranks there."""
    inside, between = levels_of(of, leader=leader)
    values = {rank: float(3**rank) for group in of for rank in group}
    reduced = {r: inside.weight * sum(values[p] for p in g) for g in inside.groups for r in g}
    mean = sum(values.values()) / len(values)
    assert between.groups
    for group in between.groups:
        found = between.weight * sum(reduced[rank] for rank in group)
        assert found == pytest.approx(mean, rel=1e-14)


@every_form
def test_owners_of_all_hosts_meet_once(of: Hosts, leader: bool) -> None:
    inside, between = levels_of(of, leader=leader)
    assert inside.groups == of
    here = [rank for group in of for rank in group[: inside.owners]]
    assert sorted(rank for group in between.groups for rank in group) == sorted(here)
    rows = rows_of(of)
    for group in between.groups:
        assert [rows[rank] for rank in group] == list(range(len(of)))
    assert len(between.groups) == inside.owners
    assert not between.owners
    even = len({len(group) for group in of}) == 1
    assert inside.owners == (len(of[0]) if even and not leader else 1)


@pytest.mark.parametrize("leader", [False, True])
def test_uneven_groups_have_leaders(leader: bool) -> None:
    inside, between = levels_of(UNEVEN, leader=leader)
    assert (inside.owners, inside.weight) == (1, 2 / 4)
    assert between.groups == ((0, 3),)
    assert [between.group_of(rank) for rank in range(4)] == [(0, 3), None, None, (0, 3)]


def test_the_two_forms_of_even_groups() -> None:
    assert levels_of(EVEN, leader=False)[1].groups == ((0, 2), (1, 3))
    assert levels_of(EVEN, leader=True)[1].groups == ((0, 2),)


@given(hosts())
def test_lists_become_tuples_and_every_rank_is_in_them_once(of: Hosts) -> None:
    require_cover(of, world_size=sum(map(len, of)))
    assert hosts_of([list(ranks) for ranks in of]) == hosts_of(of) == of


@pytest.mark.parametrize(
    "bad",
    [
        [0, 1],
        [[0, 1], 2],
        [[[0], [1]], [[2]]],
        [],
        [[]],
        [[0], []],
        "01",
        [["0"]],
        [[0.0]],
        [[True]],
        [[None]],
    ],
)
def test_groups_hold_ranks_and_are_not_empty(bad: Any) -> None:
    with pytest.raises(ValueError, match="must be groups of ranks") as error:
        hosts_of(bad)
    assert str(error.value).endswith(f"got {bad!r}")


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (((0, 1), (2,)), "missing [3], more than once [], unknown []"),
        (((0, 1), (1, 2, 3)), "missing [], more than once [1], unknown []"),
        (((0, 1), (2, 3, 4)), "missing [], more than once [], unknown [4]"),
        (((0, 1), (-1, 1)), "missing [2, 3], more than once [1], unknown [-1]"),
    ],
)
def test_groups_must_cover_the_world(of: Hosts, said: str) -> None:
    with pytest.raises(ValueError, match="each of the 4 ranks once") as error:
        require_cover(of, world_size=4)
    assert said in str(error.value)


def test_blocks() -> None:
    assert blocks_of(2, world_size=4) == ((0, 1), (2, 3))
    assert blocks_of(1, world_size=2) == ((0,), (1,))
    assert blocks_of(4, world_size=4) == ((0, 1, 2, 3),)
    with pytest.raises(ValueError, match="got ranks_per_host=3 for 4 ranks"):
        blocks_of(3, world_size=4)
