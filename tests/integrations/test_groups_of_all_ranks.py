"""The groups of all ranks follow from what each was told and what it calls its host."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from test_messages import message
from test_refusals_of_groups import grouped
from torch import nn
from worlds import Rank, run_threads

from lightning_dist.integrations.torch import networks
from lightning_dist.integrations.torch.ddp import compress_ddp
from lightning_dist.topology.launcher import Claim


@pytest.mark.parametrize(
    ("hosts", "tree"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aaab", ((0, 1, 2), (3,))),
        ("abbc", ((0,), (1, 2), (3,))),
        ("aaaa", None),
        ("abcd", None),
        ("a", None),
    ],
)
def test_auto_is_hierarchical_where_there_are_two_levels(hosts: str, tree: Any) -> None:
    assert grouped(hosts) == tree
    assert grouped(hosts, hierarchical=False) is None
    if tree is not None:
        assert grouped(hosts, hierarchical=True) == grouped(hosts, hierarchical="leader") == tree


def test_declared_groups_need_not_be_hosts() -> None:
    """Hosts of one rank each, on two sites."""
    assert grouped("abcd", rank_groups=[[0, 1], [2, 3]]) == ((0, 1), (2, 3))


def test_a_launcher_that_contradicts_the_names(caplog: pytest.LogCaptureFixture) -> None:
    """The names are used and rank 0 warns, unless a hierarchy was asked for."""
    claims = [Claim("torchrun", rank // 2, 2).as_fact() for rank in range(4)]
    said = "torchrun reports ranks 0 to 3 on nodes [0, 0, 1, 1], but their host names"
    assert grouped("xxxx", claims=claims) is None
    assert said in caplog.text
    assert "ranks_per_host=" in caplog.text
    caplog.clear()
    assert said in message(grouped, "xxxx", claims=claims, hierarchical=True)
    assert grouped("xxxx", claims=claims, ranks_per_host=2) == ((0, 1), (2, 3))
    assert grouped("xxxx", claims=claims, hierarchical=False) is None
    assert not caplog.text, "what was declared needs no names"


def attached(rank: Rank, tree: Any = None, **settings: Any) -> Any:
    model = rank.ddp(nn.Linear(2, 2))
    return compress_ddp(model, groups=rank.groups(tree), **settings)


@pytest.mark.parametrize(
    ("first", "others", "views"),
    [
        (
            {"ranks_per_host": 2},
            {"ranks_per_host": 1},
            ["2 hosts x 2 ranks: ((0, 1), (2, 3))", "4 hosts x 1 rank: ((0,), (1,), (2,), (3,))"],
        ),
        (
            {"rank_groups": [[0, 1], [2, 3]]},
            {"rank_groups": [[0, 2], [1, 3]]},
            ["((0, 1), (2, 3))", "((0, 2), (1, 3))"],
        ),
        (
            {"ranks_per_host": 2},
            {},
            ["2 hosts x 2 ranks: ((0, 1), (2, 3))", "by host name"],
        ),
        (
            {"ranks_per_host": 3},
            {"ranks_per_host": 2},
            ["ranks_per_host=3", "2 hosts x 2 ranks: ((0, 1), (2, 3))"],
        ),
    ],
    ids=["per host", "groups", "one says nothing", "one is wrong"],
)
def test_ranks_that_see_different_groups(first: Any, others: Any, views: list[str]) -> None:
    """Both views are in the message of every rank."""

    def body(rank: Rank) -> str:
        return message(attached, rank, **(others if rank.rank else first))

    texts = set(run_threads(body, 4))
    (text,) = texts
    assert "groups: " in text
    assert all(view in text for view in views), text
    assert "on rank 0; " in text
    assert "on ranks 1, 2, 3" in text


def test_groups_of_levels_must_be_those_of_the_levels() -> None:
    def body(rank: Rank) -> list[str]:
        model = rank.ddp(nn.Linear(2, 2))
        both, levels = rank.groups(), rank.groups([[0, 1], [2, 3]])[2:]
        wrong = [[*both, levels[1]], [*both, levels[0]], both[:1], [*both, *levels]]
        settings: list[Any] = [{"ranks_per_host": 2}] * 3 + [{"hierarchical": False}]
        return [
            message(compress_ddp, model, groups=groups, **of)
            for groups, of in zip(wrong, settings, strict=True)
        ]

    other, none, one, flat = run_threads(body, 4)[1]
    assert "rank 1 needs one of the ranks [0, 1] in this order" in other
    assert "got rank 0 of 2" in other
    assert "rank 1 needs one of the ranks [1, 3]" in none
    assert "got none" in none
    assert one == "groups must be two process groups or more, got 1"
    assert "Groups of levels need a hierarchical exchange, got 2 of them" in flat


def test_ranks_that_disagree_on_the_form() -> None:
    def body(rank: Rank) -> str:
        form = "leader" if rank.rank == 3 else True
        return message(attached, rank, ranks_per_host=2, hierarchical=form)

    (text,) = set(run_threads(body, 4))
    assert "hierarchical: True on ranks 0, 1, 2; 'leader' on rank 3" in text


def test_the_same_message_on_every_rank() -> None:
    def body(rank: Rank) -> str:
        return message(attached, rank, rank_groups=[[0, 1], [2]])

    (text,) = set(run_threads(body, 4))
    assert "missing [3]" in text


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab", "aaaa", "abcd"])
def test_the_hosts_of_all_ranks_decide(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every rank calls its host is gathered, and the groups follow."""
    here = threading.local()
    monkeypatch.setattr(networks, "this_host", lambda: here.name)
    tree = grouped(hosts)

    def body(rank: Rank) -> tuple[bool, tuple[int, ...]]:
        here.name = hosts[rank.rank]
        reducer = attached(rank, tree)
        reducer.close()
        topology = reducer.network.topology
        assert (topology.intra_group is None) == (tree is None)
        return reducer.network.intra is not None, topology.local_ranks

    for rank, (levels, local) in enumerate(run_threads(body, len(hosts))):
        assert levels == (tree is not None)
        assert local == tuple(r for r, host in enumerate(hosts) if host == hosts[rank])
