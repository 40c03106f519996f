"""Trees of ranks: what is refused, and the way of every rank's gradient through them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from trees import EXAMPLES, ranks_of, trees, way_of, ways_of

from lightning_dist.topology.groups import (
    Tree,
    blocks_of,
    innermost,
    levels_of,
    require_cover,
    rows_of,
    tree_of,
)

every_tree = given(trees(), st.booleans())
even = ((0, 1), (2, 3))


@every_tree
@example(EXAMPLES[2], False)
@example(EXAMPLES[6], False)
def test_the_weights_along_the_way_give_the_mean(tree: Tree, leader: bool) -> None:
    """Whoever goes on between the outermost groups has the mean of all ranks there."""
    ways = ways_of(tree, leader=leader)
    values = [float(3**rank) for rank in range(len(ways))]
    now = dict(enumerate(values))
    for depth in range(max(len(way.levels) for way in ways)):
        reduced = {}
        for rank, way in enumerate(ways):
            if len(way.levels) > depth and way.goes_on(rank, depth):
                level, members = way.levels[depth], way.members[depth]
                reduced[rank] = level.weight * sum(now[member] for member in members)
        now = reduced
    mean = sum(values) / len(values)
    assert now
    for rank in now:
        outer = ways[rank].outer
        assert sum(now[peer] for peer in outer) / len(outer) == pytest.approx(mean, rel=1e-14)


@every_tree
def test_all_members_of_a_group_know_the_same_group(tree: Tree, leader: bool) -> None:
    ways = ways_of(tree, leader=leader)
    for rank, way in enumerate(ways):
        for depth, (level, members) in enumerate(zip(way.levels, way.members, strict=True)):
            assert rank in members
            for member in members:
                assert ways[member].members[depth] == members
                assert ways[member].levels[depth] == level
        assert all(ways[peer].outer == way.outer for peer in way.outer)
        goes_on = [way.goes_on(rank, depth) for depth in range(len(way.levels))]
        assert (rank in way.outer) == all(goes_on)
        assert all(goes_on[:-1])


@every_tree
def test_the_outer_groups_join_all_branches_and_share_the_gradient(
    tree: Tree, leader: bool
) -> None:
    """``owners * beyond`` of the innermost level is how many parts a gradient is in outside."""
    ways, rows = ways_of(tree, leader=leader), rows_of(tree, world_size=len(ranks_of(tree)))
    outers = {way.outer for way in ways if way.outer}
    for outer in outers:
        assert [rows[rank] for rank in outer] == list(range(len(tree)))
    for way in ways:
        assert way.levels[0].owners * way.levels[0].beyond == len(outers)
        owners = [level.owners for level in way.levels]
        if way.outer:
            beyond = [math.prod(owners[depth + 1 :]) for depth in range(len(owners))]
            assert [level.beyond for level in way.levels] == beyond
    if leader:
        assert len(outers) == 1


@pytest.mark.parametrize("leader", [False, True])
def test_uneven_groups_have_leaders(leader: bool) -> None:
    ways = ways_of(((0, 1, 2), (3,)), leader=leader)
    assert [way.levels[0].owners for way in ways] == [1] * 4
    assert [way.outer for way in ways] == [(0, 3), (), (), (0, 3)]
    assert [way.levels[0].weight for way in ways] == [2 / 4] * 4


def test_the_two_forms_of_even_groups() -> None:
    assert [way.outer for way in ways_of(even, leader=False)] == [(0, 2), (1, 3)] * 2
    assert [way.outer for way in ways_of(even, leader=True)] == [(0, 2), (), (0, 2), ()]


def test_only_the_uneven_level_has_leaders() -> None:
    """Pairs within, three pairs in one site and one in the other."""
    tree = (((0, 1), (2, 3), (4, 5)), ((6, 7),))
    way = way_of(tree, 3, leader=False)
    assert way.members == [(2, 3), (1, 3, 5)]
    assert [level.owners for level in way.levels] == [2, 1]
    assert way.outer == ()
    assert [level.weight for level in way.levels] == [4 / 8, 2 / 4]
    assert way_of(tree, 1, leader=False).outer == (1, 7)
    assert [level.beyond for level in way.levels] == [1, 1]


@given(trees())
def test_lists_become_the_tree_and_every_rank_is_in_it_once(tree: Tree) -> None:
    world_size = len(ranks_of(tree))
    require_cover(tree, world_size=world_size)
    groups = innermost(tree)
    assert sorted(sum(groups, ())) == list(range(world_size))
    counts = Counter(rows_of(tree, world_size=world_size))
    assert [counts[row] for row in range(len(tree))] == [len(ranks_of_branch(b)) for b in tree]
    assert tree_of([list(branch) for branch in tree]) == tree_of(tree) == tree


def ranks_of_branch(branch: Tree) -> list[int]:
    return [rank for group in innermost(branch) for rank in group]


@pytest.mark.parametrize("bad", [[0, 1], [[0, 1], 2], [[[0], [1]], [2]], [[[0]], [[1], 2]]])
def test_groups_must_be_equally_deep(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="must be groups of ranks, all equally deep") as error:
        tree_of(bad)
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        ([], "[]"),
        ([[]], "[]"),
        ([[0], []], "[]"),
        ("01", "'01'"),
        ([["0"]], "'0'"),
        ([[0.0]], "0.0"),
        ([[True]], "True"),
        ([[None]], "None"),
    ],
)
def test_groups_hold_ranks_and_are_not_empty(bad: Any, got: str) -> None:
    with pytest.raises(ValueError, match="must hold ranks") as error:
        tree_of(bad)
    assert str(error.value).endswith(f"got {got}")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (((0, 1), (2,)), "missing [3], more than once [], unknown []"),
        (((0, 1), (1, 2, 3)), "missing [], more than once [1], unknown []"),
        (((0, 1), (2, 3, 4)), "missing [], more than once [], unknown [4]"),
        (((0, 1), (-1, 1)), "missing [2, 3], more than once [1], unknown [-1]"),
    ],
)
def test_groups_must_cover_the_world(tree: Tree, said: str) -> None:
    with pytest.raises(ValueError, match="each of the 4 ranks once") as error:
        require_cover(tree, world_size=4)
    assert said in str(error.value)


def test_blocks() -> None:
    assert blocks_of(2, world_size=4) == ((0, 1), (2, 3))
    assert blocks_of(1, world_size=2) == ((0,), (1,))
    assert blocks_of(4, world_size=4) == ((0, 1, 2, 3),)
    with pytest.raises(ValueError, match="got ranks_per_host=3 for 4 ranks"):
        blocks_of(3, world_size=4)


@every_tree
@example(EXAMPLES[2], False)
@example(EXAMPLES[6], False)
def test_the_ranks_that_go_on_are_in_a_group_of_the_next_level(tree: Tree, leader: bool) -> None:
    """Once each, and in no group besides; all ranks begin, nobody goes on from the outermost."""
    here = set(ranks_of(tree))
    for level in levels_of(tree, leader=leader):
        assert sorted(rank for group in level.groups for rank in group) == sorted(here)
        here = {rank for group in level.groups for rank in group[: level.owners]}
    assert not here
