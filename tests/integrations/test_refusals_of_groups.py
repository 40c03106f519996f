"""Groups and levels that cannot be: refused with the rule, the numbers received, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_messages import message

from lightning_dist.integrations.torch.grouping import topology_of
from lightning_dist.settings import Settings
from lightning_dist.topology.groups import hosts_of

NEEDS_HOSTS = "needs several hosts, one of them with several ranks, got "


def grouped(hosts: str, *, claims: Sequence[Any] | None = None, **settings: Any) -> Any:
    """The tree that these settings mean on ``hosts``, one letter a rank; None: flat."""
    checked = Settings.check(**settings)
    said = claims or [None] * len(hosts)
    return topology_of(checked, hosts=list(hosts), claims=said, rank=0)[1]


@pytest.mark.parametrize("hierarchical", [True, "leader"])
@pytest.mark.parametrize(
    ("hosts", "counts"),
    [("aaaa", "1 host x 4 ranks"), ("abc", "3 hosts x 1 rank")],
)
def test_one_level_is_not_hierarchical(hosts: str, counts: str, hierarchical: Any) -> None:
    assert message(grouped, hosts, hierarchical=hierarchical) == (
        f"hierarchical={hierarchical!r} {NEEDS_HOSTS}{counts}; leave it at 'auto', or name the "
        "groups with ranks_per_host= or rank_groups="
    )


@pytest.mark.parametrize("of", [1, 4])
def test_declared_hosts_of_one_level(of: int) -> None:
    text = message(grouped, "aabb", hierarchical=True, ranks_per_host=of)
    assert NEEDS_HOSTS + ("4 hosts x 1 rank" if of == 1 else "1 host x 4 ranks") in text


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0], [1], [2], [3]]])
def test_declared_groups_of_one_level(groups: list[Any]) -> None:
    text = message(grouped, "aabb", rank_groups=groups)
    assert text.startswith("rank_groups must be several groups, one of them with several ranks")
    assert str(hosts_of(groups)) in text


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[0, 1], [2]], "missing [3], more than once [], unknown []"),
        ([[0, 1], [2, 3, 1]], "missing [], more than once [1], unknown []"),
        ([[0, 1], [2, 3, 7]], "missing [], more than once [], unknown [7]"),
        ([[0, 1], [2, -3]], "missing [3], more than once [], unknown [-3]"),
    ],
)
def test_groups_must_cover_all_ranks(groups: list[Any], said: str) -> None:
    assert message(grouped, "aabb", rank_groups=groups) == (
        f"rank_groups must name each of the 4 ranks once; {said}; write such as [[0, 1], [2, 3]]"
    )


@pytest.mark.parametrize(
    "groups",
    [
        [0, 1, 2, 3],
        [[0, 1], 2, 3],
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        4,
        [],
        [[0, 1], []],
        "01",
        [["0", "1"], ["2", "3"]],
        [[0, 1], [2, 3.0]],
        [[0, True]],
        {0: [1]},
    ],
    ids=str,
)
def test_groups_hold_ranks(groups: Any) -> None:
    assert message(Settings.check, rank_groups=groups) == (
        "rank_groups must be groups of ranks (int), none of them empty, like [[0, 1], [2, 3]], got "
        f"{groups!r}"
    )


@pytest.mark.parametrize("value", [0, -2, True, 2.0, "2"])
def test_ranks_per_host_is_a_number(value: Any) -> None:
    assert message(Settings.check, ranks_per_host=value) == (
        f"ranks_per_host must be 1 or more ranks, got {value!r}"
    )


def test_ranks_per_host_divides_the_world() -> None:
    assert message(grouped, "aabb", ranks_per_host=3) == (
        "ranks_per_host must divide the number of ranks, got ranks_per_host=3 for 4 ranks; name "
        "the groups with rank_groups=[[0, 1, 2], [3]]"
    )


def test_groups_are_named_once() -> None:
    text = message(Settings.check, ranks_per_host=2, rank_groups=[[0, 1], [2, 3]])
    assert "got ranks_per_host=2 and rank_groups=[[0, 1], [2, 3]]; give one" in text


@pytest.mark.parametrize("value", ["yes", "Leader", 1, None, 0])
def test_hierarchical_is_one_of_four(value: Any) -> None:
    assert message(Settings.check, hierarchical=value) == (
        f"hierarchical must be 'auto', True, False or 'leader', got {value!r}"
    )


@pytest.mark.parametrize(
    "codec", [{"intra": "bf16"}, {"inter": "int8"}, {}, {"intra": "bf16", "inter": "int8", "x": 1}]
)
def test_a_codec_for_each_level_has_two_keys(codec: Any) -> None:
    text = message(Settings.check, codec)
    assert text.startswith("A codec for each level is {'intra': inside a host, 'inter': between")
    assert text.endswith(
        f"got the keys {sorted(codec)}; policies are by_size, by_name, warmup, after_steps"
    )


@pytest.mark.parametrize(
    "intra",
    ["int8", "int4", "sign", "topk", "dgc", "qsgd", "terngrad", "powersgd", "threshold", "randomk"],
)
def test_codecs_that_do_not_fit_inside(intra: str) -> None:
    assert message(Settings.check, {"intra": intra, "inter": "int8"}) == (
        "Inside a host gradients are summed without decoding, so 'intra' must be one of none, "
        f"fp16, bf16, got {intra!r}; give it to 'inter'"
    )


def test_codecs_of_levels_need_levels() -> None:
    levels = {"intra": "bf16", "inter": "int8"}
    assert "with hierarchical=False; give one codec" in message(
        Settings.check, levels, hierarchical=False
    )
    for hosts, counts in (("aaaa", "1 host x 4 ranks"), ("abcd", "4 hosts x 1 rank")):
        text = message(grouped, hosts, codec=levels)
        assert text.startswith("A codec for each level needs several hosts")
        assert counts in text
    assert grouped("aaaa", codec={"intra": "none", "inter": "int8"}) is None
    assert grouped("aabb", codec=levels) == ((0, 1), (2, 3))
