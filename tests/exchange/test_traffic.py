"""How many bytes a rank sends, and where to."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import Rank, run_threads

from lightning_dist.codecs import Int8, Plane
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.rounds import AllGather, AllReduce, TwoShot
from lightning_dist.exchange.traffic import (
    Sent,
    all_to_all,
    broadcasts,
    ring_all_gather,
    ring_allreduce,
    scatter,
)
from lightning_dist.exchange.wire import row_bytes
from lightning_dist.topology import Topology, this_host

FORMULAS = [ring_allreduce, ring_all_gather, all_to_all]


def world(hosts: str) -> list[Topology]:
    """``"aabb"``: ranks 0 and 1 on host a, 2 and 3 on host b."""
    return [Topology(tuple(hosts), rank) for rank in range(len(hosts))]


def test_on_one_host_nothing_leaves_it() -> None:
    for topology in world("aaaa"):
        assert ring_allreduce(800, topology) == Sent(intra=2 * 3 * 800 // 4)
        assert ring_all_gather(800, topology) == Sent(intra=3 * 800)
        assert all_to_all(800, topology) == Sent(intra=3 * 200)


def test_one_rank_per_host_everything_leaves() -> None:
    for topology in world("abcd"):
        assert ring_allreduce(800, topology) == Sent(inter=1200)
        assert ring_all_gather(800, topology) == Sent(inter=2400)
        assert all_to_all(800, topology) == Sent(inter=600)


def test_two_ranks_per_host() -> None:
    """A ring leaves the host at its last rank only; all_to_all sends to each of both others."""
    rings = [ring_allreduce(800, topology) for topology in world("aabb")]
    assert rings == [Sent(intra=1200), Sent(inter=1200)] * 2
    gathers = [ring_all_gather(800, topology) for topology in world("aabb")]
    assert gathers == [Sent(intra=2400), Sent(inter=2400)] * 2
    assert [all_to_all(800, t) for t in world("aabb")] == [Sent(intra=200, inter=400)] * 4


def test_uneven_hosts() -> None:
    assert [all_to_all(300, t) for t in world("aab")] == [
        Sent(100, 100),
        Sent(100, 100),
        Sent(0, 200),
    ]


@pytest.mark.parametrize("formula", FORMULAS)
def test_alone_nothing_is_sent(formula: Callable[[int, Topology], Sent]) -> None:
    assert formula(800, Topology(("a",), 0)) == Sent()


@given(st.text("abc", min_size=2, max_size=6), st.integers(1, 1000))
def test_hosts_change_where_bytes_go_and_not_how_many(hosts: str, blocks: int) -> None:
    nbytes = blocks * len(hosts)
    for formula in FORMULAS:
        flat = formula(nbytes, Topology(tuple("x" * len(hosts)), 0)).total
        assert {formula(nbytes, topology).total for topology in world(hosts)} == {flat}


def test_shares_of_any_size() -> None:
    """Two hosts of two: to each other rank its share, from each owner its own to all others."""
    shares = [10, 20, 30, 0]
    assert [scatter(shares, topology) for topology in world("aabb")] == [
        Sent(intra=20, inter=30),
        Sent(intra=10, inter=30),
        Sent(intra=0, inter=30),
        Sent(intra=30, inter=30),
    ]
    assert [broadcasts(shares, topology) for topology in world("aabb")] == [
        Sent(intra=10, inter=20),
        Sent(intra=20, inter=40),
        Sent(intra=30, inter=60),
        Sent(),
    ]


@given(st.text("ab", min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_all_shares_reach_all_other_ranks(hosts: str, random: Random) -> None:
    shares = [random.choice([0, 8, 24]) for _ in hosts]
    for way in (scatter, broadcasts):
        total = sum(way(shares, topology).total for topology in world(hosts))
        assert total == (len(hosts) - 1) * sum(shares)


def test_sent_is_the_sum_of_both_rounds() -> None:
    """AllGather: (W-1) rows. Two-shot: (W-1) rows to their owners and (W-1) rows of means."""

    def body(rank: Rank) -> tuple[Sent, Sent, Sent]:
        planes = Int8(block_size=16).planes(torch.float32)
        make = {
            "channel": Channel(rank.group("data")),
            "topology": rank.topology(),
            "device": torch.device("cpu"),
        }
        gather = AllGather(row_bytes(planes, 3), **make)
        two_shot = TwoShot([row_bytes(planes, 3)] * rank.size, **make)
        reduce = AllReduce([Plane(torch.float16, 1)], 100, keep_own=True, **make)
        return gather.sent, two_shot.sent, reduce.sent

    row = 8 + 48  # 3 scales of 2 bytes padded to 8, 3 blocks of 16 codes
    gather, two_shot, reduce = run_threads(body, 4)[0]
    assert gather == Sent(inter=3 * row)
    assert two_shot == Sent(inter=3 * row + 3 * row)
    assert reduce == Sent(inter=2 * 3 * 200 // 4)


def test_sent_adds() -> None:
    assert Sent(1, 2) + Sent(10, 20) == Sent(11, 22)
    assert (Sent(1, 2) + Sent(10, 20)).total == 33


@pytest.mark.parametrize(
    ("hosts", "text"),
    [("aabb", "2 hosts x 2 ranks"), ("a", "1 host x 1 rank"), ("aab", "2 hosts with 2, 1 ranks")],
)
def test_topology_describes_itself(hosts: str, text: str) -> None:
    assert world(hosts)[0].describe() == text


def test_the_host_name_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several hosts report one name."""
    monkeypatch.setenv("LIGHTNING_DIST_HOSTNAME", "left")
    assert this_host() == "left"
    monkeypatch.delenv("LIGHTNING_DIST_HOSTNAME")
    assert this_host() != "left"
