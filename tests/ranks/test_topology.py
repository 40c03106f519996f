"""Ranks that share a node, by their names and launchers, and the levels in which groups reduce."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dist.ranks import Topology
from lightning_dist.ranks.launch import Claim, claim, contradiction, promised_ranks
from lightning_dist.ranks.levels import (
    Nodes,
    blocks_of,
    is_nodes,
    levels_of,
    nodes_of,
    require_cover,
    rows_of,
)

EVEN = ((0, 1), (2, 3))
UNEVEN = ((0, 1, 2), (3,))


@st.composite
def nodes(draw: st.DrawFn) -> Nodes:
    """1 to 4 nodes of 1 to 4 ranks, in any order; half of them even."""
    count, even = draw(st.integers(1, 4)), draw(st.booleans())
    first = draw(st.integers(1, 4))
    sizes = [first if even else draw(st.integers(1, 4)) for _ in range(count)]
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)


every_form = given(nodes(), st.booleans())


@every_form
@example(((3, 0), (1, 2)), False)
@example(UNEVEN, False)
def test_the_weights_give_the_mean(of: Nodes, leader: bool) -> None:
    """Whoever goes on between nodes has the mean of all ranks there."""
    inside, between = levels_of(of, leader=leader)
    values = {rank: float(3**rank) for group in of for rank in group}
    reduced = {r: inside.weight * sum(values[p] for p in g) for g in inside.groups for r in g}
    mean = sum(values.values()) / len(values)
    assert between.groups
    for group in between.groups:
        found = between.weight * sum(reduced[rank] for rank in group)
        assert found == pytest.approx(mean, rel=1e-14)


@every_form
def test_owners_of_all_hosts_meet_once(of: Nodes, leader: bool) -> None:
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


@given(nodes())
def test_lists_become_tuples_and_every_rank_is_in_them_once(of: Nodes) -> None:
    require_cover(of, world_size=sum(map(len, of)))
    assert nodes_of([list(ranks) for ranks in of]) == nodes_of(of) == of


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
    assert not is_nodes(bad)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (((0, 1), (2,)), "missing [3], more than once [], unknown []"),
        (((0, 1), (1, 2, 3)), "missing [], more than once [1], unknown []"),
        (((0, 1), (2, 3, 4)), "missing [], more than once [], unknown [4]"),
        (((0, 1), (-1, 1)), "missing [2, 3], more than once [1], unknown [-1]"),
    ],
)
def test_groups_must_cover_the_world(of: Nodes, said: str) -> None:
    with pytest.raises(ValueError, match="each of the 4 ranks once") as error:
        require_cover(of, world_size=4)
    assert said in str(error.value)


def test_blocks() -> None:
    assert blocks_of(2, world_size=4) == ((0, 1), (2, 3))
    assert blocks_of(1, world_size=2) == ((0,), (1,))
    assert blocks_of(4, world_size=4) == ((0, 1, 2, 3),)
    with pytest.raises(ValueError, match="got ranks_per_node=3 for 4 ranks"):
        blocks_of(3, world_size=4)


hosts_and_rank = st.text("abc", min_size=1, max_size=7).flatmap(
    lambda nodes: st.tuples(st.just(tuple(nodes)), st.integers(0, len(nodes) - 1))
)


@given(hosts_and_rank)
def test_every_rank_is_on_one_host(place: tuple[tuple[str, ...], int]) -> None:
    nodes, rank = place
    topology = Topology(nodes, rank)
    assert sorted(sum(topology.by_node(), ())) == list(range(len(nodes)))
    assert [nodes[ranks[0]] for ranks in topology.by_node()] == list(dict.fromkeys(nodes))
    (here,) = [ranks for ranks in topology.by_node() if rank in ranks]
    assert topology.local_ranks == here == tuple(sorted(here))
    assert topology.local_ranks[topology.local_rank] == rank
    assert {nodes[peer] for peer in here} == {nodes[rank]}


@given(hosts_and_rank, st.randoms(use_true_random=False))
def test_a_group_of_ranks_is_a_topology_of_its_own(
    place: tuple[tuple[str, ...], int], random: Random
) -> None:
    nodes, rank = place
    others = [peer for peer in range(len(nodes)) if peer != rank]
    ranks = [*others[: len(others) // 2], rank]
    random.shuffle(ranks)
    group = Topology(nodes, rank).among(ranks)
    assert ranks[group.rank] == rank
    assert group.nodes == tuple(nodes[peer] for peer in ranks)
    assert group.world_size == len(ranks)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ("aabb", "2 nodes x 2 ranks"),
        ("abab", "2 nodes x 2 ranks"),
        ("abaa", "2 nodes with 3, 1 ranks"),
        ("abc", "3 nodes x 1 rank"),
        ("aa", "1 node x 2 ranks"),
    ],
)
def test_it_describes_itself(nodes: str, text: str) -> None:
    assert Topology(tuple(nodes), 0).describe() == text


def test_groups_do_not_count_when_topologies_are_compared() -> None:
    plain = Topology(("a", "b"), 0)
    group: Any = object()
    assert plain == Topology(("a", "b"), 0, intra_group=group, inter_group=group)
    assert (plain.intra_group, plain.inter_group) == (None, None)


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
TORCHRUN = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_RANK": "1", "RANK": "3"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, Claim("torchrun", node=1, local_size=2)),
        ({"LOCAL_WORLD_SIZE": "2"}, Claim("torchrun", node=None, local_size=2)),
        (SRUN, Claim("SLURM", node=1)),
        ({**SRUN, **TORCHRUN}, Claim("torchrun", node=1, local_size=2)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Claim("Open MPI", local_size=2)),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "2"}, Claim("MVAPICH2", local_size=2)),
        ({"MPI_LOCALNRANKS": "2"}, Claim("MPICH", local_size=2)),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1"}, Claim("Lightning", node=1)),
        ({"LOCAL_RANK": "1"}, None),
        ({"NODE_RANK": "1"}, None),
        ({"MPI_LOCALNRANKS": "many"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_claims(environment: Mapping[str, str], expected: Claim | None) -> None:
    assert claim(rank=3, environment=environment) == expected


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_NTASKS": "4", "SLURM_NODEID": "0"},  # sbatch: a script that starts processes
        {**SRUN, "SLURM_PROCID": "0"},  # its first process has the variables of the script's task
        {**SRUN, "SLURM_NTASKS": "1"},  # srun --pty bash
        {key: value for key, value in SRUN.items() if key != "SLURM_NTASKS"},
    ],
    ids=["sbatch", "script", "pty", "no count"],
)
def test_a_shell_in_an_allocation_says_nothing_of_its_ranks(shell: Mapping[str, str]) -> None:
    """``claim`` of rank 3 where SLURM has not started rank 3."""
    assert claim(rank=3, environment=shell) is None
    within = {**shell, "LOCAL_RANK": "1", "NODE_RANK": "2"}
    assert claim(rank=3, environment=within) == Claim("Lightning", node=2)


def said(
    launcher: str, nodes: list[int | None], sizes: list[int | None]
) -> list[dict[str, object]]:
    return [Claim(launcher, n, s).as_fact() for n, s in zip(nodes, sizes, strict=True)]


@pytest.mark.parametrize(
    ("nodes", "claims", "text"),
    [
        ("aabb", said("torchrun", [0, 0, 1, 1], [2] * 4), None),
        ("aabb", said("SLURM", [1, 1, 0, 0], [None] * 4), None),
        ("aabb", said("MPICH", [None] * 4, [2] * 4), None),
        ("aabb", [None] * 4, None),
        ("aabb", [*said("torchrun", [0, 0, 0], [4] * 3), None], None),  # one says nothing
        ("ab", said("torchrun", [0, 1], [8, 8]), None),  # a group may leave ranks of a node out
        (
            "xxxx",
            said("torchrun", [0, 0, 1, 1], [2] * 4),
            "torchrun reports ranks 0 to 3 on nodes [0, 0, 1, 1], but their host names are "
            "['x', 'x', 'x', 'x']",
        ),
        (
            "yxxx",
            said("Open MPI", [None] * 4, [1, 2, 2, 2]),
            "Open MPI reports 2 ranks on the node of rank 1, but 3 ranks have the host name 'x'",
        ),
    ],
)
def test_what_launchers_and_host_names_say(nodes: str, claims: Any, text: str | None) -> None:
    assert contradiction([*nodes], claims) == text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE", 2)),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ("OMPI_COMM_WORLD_SIZE", 4)),
        ({"PMI_SIZE": "4", "WORLD_SIZE": "1"}, ("PMI_SIZE", 4)),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, ("SLURM_STEP_NUM_TASKS", 4)),
        ({"SLURM_NTASKS": "4"}, None),  # an sbatch script, which is one process
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "many"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_promised_ranks(environment: Mapping[str, str], expected: tuple[str, int] | None) -> None:
    assert promised_ranks(environment) == expected
