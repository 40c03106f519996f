"""Groups and levels that cannot be, and groups that are all ranks', of processes, or replaced."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attach_groups import CASES
from processes import torchrun
from test_messages import message
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.elastic.recovery.groups import init_alone
from lightning_dist.integrations.torch import networks
from lightning_dist.integrations.torch.ddp import compress_ddp
from lightning_dist.integrations.torch.grouping import topology_of
from lightning_dist.integrations.torch.regroup import from_rank
from lightning_dist.private import send_buffers
from lightning_dist.settings import Settings
from lightning_dist.topology.groups import hosts_of
from lightning_dist.topology.launcher import Claim

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


SCRIPT = Path(__file__).with_name("attach_groups.py")
LIMIT = 90.0  # seconds; about 10 are needed on an idle machine


@pytest.fixture(scope="module")
def processes(
    tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]
) -> list[dict[str, object]]:
    """What every rank has got of each case before the end, or before the launch hung."""
    folder = tmp_path_factory.mktemp("processes")
    torchrun(SCRIPT, folder, ranks=4, limit=LIMIT, python=quick_python)
    files = [folder / str(rank) for rank in range(4)]
    return [dict(map(json.loads, file.read_text().splitlines())) for file in files]


@pytest.mark.parametrize("case", [case for case, _ in CASES])
def test_every_rank_has_the_mean(processes: list[dict[str, object]], case: str) -> None:
    """In any order of groups and ranks; also where ranks have made different numbers of groups."""
    assert [found.get(case, "it hung") for found in processes] == [0.0] * 4


@pytest.fixture
def alone() -> Iterator[None]:
    if dist.is_initialized():  # Lightning leaves the group of a Trainer of another test
        assert dist.get_world_size() == 1
        yield
        return
    init_alone()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_rank_that_needs_no_state_does_not_receive_it() -> None:
    """There are no such ranks, and none is asked."""
    assert from_rank(None, rank=1, to=[2, 3]) is None


@pytest.mark.usefixtures("alone")
def test_buffers_of_one_type_are_sent_in_one_collective() -> None:
    """Running means, variances and counts of 20 layers, but those that DDP ignores."""
    module = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(20)))
    ignored = [name for name, _ in module.named_buffers() if name.startswith("20.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = DistributedDataParallel(module)
    with torch.profiler.profile(record_shapes=True) as profile:
        send_buffers(model)
    sent = [each.input_shapes for each in profile.events() if each.name == "gloo:broadcast"]
    counts, values = 19, 19 * 8  # without the last layer
    assert sorted(sent) == [[[counts]], [[values]]]
