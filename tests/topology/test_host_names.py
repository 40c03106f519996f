"""Which ranks share a host, by the names that they give."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.topology import Topology

hosts_and_rank = st.text("abc", min_size=1, max_size=7).flatmap(
    lambda hosts: st.tuples(st.just(tuple(hosts)), st.integers(0, len(hosts) - 1))
)


@given(hosts_and_rank)
def test_every_rank_is_on_one_host(place: tuple[tuple[str, ...], int]) -> None:
    hosts, rank = place
    topology = Topology(hosts, rank)
    assert sorted(sum(topology.by_host(), ())) == list(range(len(hosts)))
    assert [hosts[ranks[0]] for ranks in topology.by_host()] == list(dict.fromkeys(hosts))
    (here,) = [ranks for ranks in topology.by_host() if rank in ranks]
    assert topology.local_ranks == here == tuple(sorted(here))
    assert topology.local_ranks[topology.local_rank] == rank
    assert {hosts[peer] for peer in here} == {hosts[rank]}


@given(hosts_and_rank, st.randoms(use_true_random=False))
def test_a_group_of_ranks_is_a_topology_of_its_own(
    place: tuple[tuple[str, ...], int], random: Random
) -> None:
    hosts, rank = place
    others = [peer for peer in range(len(hosts)) if peer != rank]
    ranks = [*others[: len(others) // 2], rank]
    random.shuffle(ranks)
    group = Topology(hosts, rank).among(ranks)
    assert ranks[group.rank] == rank
    assert group.hosts == tuple(hosts[peer] for peer in ranks)
    assert group.world_size == len(ranks)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("aabb", "2 hosts x 2 ranks"),
        ("abab", "2 hosts x 2 ranks"),
        ("abaa", "2 hosts with 3, 1 ranks"),
        ("abc", "3 hosts x 1 rank"),
        ("aa", "1 host x 2 ranks"),
    ],
)
def test_it_describes_itself(hosts: str, text: str) -> None:
    assert Topology(tuple(hosts), 0).describe() == text


def test_groups_do_not_count_when_topologies_are_compared() -> None:
    plain = Topology(("a", "b"), 0)
    group: Any = object()
    assert plain == Topology(("a", "b"), 0, intra_group=group, inter_group=group)
    assert (plain.intra_group, plain.inter_group) == (None, None)
