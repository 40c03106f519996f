"""Groups and levels that cannot be, and groups that are all ranks', of processes, or replaced."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import message
from needs import needs
from threads import on_threads
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.base.features import ORDERED_GROUPS
from lightning_dist.codecs import CODECS
from lightning_dist.elastic.recovery.regroup import from_rank, send_buffers
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.launch import Claim
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync import networks
from lightning_dist.sync.ddp import compress_ddp
from lightning_dist.sync.networks import topology_of


def grouped(nodes: str, *, claims: Sequence[Any] | None = None, **settings: Any) -> Any:
    """The tree that these settings mean on ``nodes``, one letter a rank; None: flat."""
    checked = ExchangeSettings(**settings)
    said = claims or [None] * len(nodes)
    return topology_of(checked, nodes=list(nodes), claims=said, rank=0)[1]


@pytest.mark.parametrize("hierarchical", [True, "leader"])
@pytest.mark.parametrize(
    ("nodes", "declared", "counts"),
    [
        ("aaaa", {}, "1 node x 4 ranks"),
        ("abc", {}, "3 nodes x 1 rank"),
        ("aabb", {"ranks_per_node": 1}, "4 nodes x 1 rank"),
        ("aabb", {"ranks_per_node": 4}, "1 node x 4 ranks"),
    ],
)
def test_one_level_is_not_hierarchical(
    nodes: str, declared: dict[str, int], counts: str, hierarchical: Any
) -> None:
    told = message(grouped, nodes, hierarchical=hierarchical, **declared)
    assert told.startswith(
        f"hierarchical={hierarchical!r} needs several nodes, one of them with several ranks, got "
        f"{counts}; leave it at 'auto', or name the groups with ranks_per_node= or rank_groups="
    )


HAVE_RANKS = "rank_groups must be several groups, one of them with several ranks"
ONCE = "rank_groups must name each of the 4 ranks once; "
SUCH_AS = "; write such as [[0, 1], [2, 3]]"


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"rank_groups": [[0, 1, 2, 3]]}, f"{HAVE_RANKS}.*((0, 1, 2, 3),).*"),
        ({"rank_groups": [[0], [1], [2], [3]]}, f"{HAVE_RANKS}.*((0,), (1,), (2,), (3,)).*"),
        (
            {"rank_groups": [[0, 1], [2]]},
            f"{ONCE}missing [3], more than once [], unknown []{SUCH_AS}",
        ),
        (
            {"rank_groups": [[0, 1], [2, 3, 1]]},
            f"{ONCE}missing [], more than once [1], unknown []{SUCH_AS}",
        ),
        (
            {"rank_groups": [[0, 1], [2, 3, 7]]},
            f"{ONCE}missing [], more than once [], unknown [7]{SUCH_AS}",
        ),
        (
            {"rank_groups": [[0, 1], [2, -3]]},
            f"{ONCE}missing [3], more than once [], unknown [-3]{SUCH_AS}",
        ),
        (
            {"ranks_per_node": 3},
            "ranks_per_node must divide the number of ranks, got ranks_per_node=3 for 4 ranks; "
            "name the groups with rank_groups=[[0, 1, 2], [3]]",
        ),
        (
            {"ranks_per_node": 2, "rank_groups": [[0, 1], [2, 3]]},
            ".*got ranks_per_node=2 and rank_groups=[[0, 1], [2, 3]]; give one.*",
        ),
    ],
)
def test_declared_groups_that_cannot_be(declared: dict[str, Any], says: str) -> None:
    pattern = re.escape(says).replace(r"\.\*", ".*")
    assert re.fullmatch(pattern, message(grouped, "aabb", **declared))


FORMS = "'auto', True, False or 'leader'"
GROUPS = "groups of ranks, none of them empty, like [[0, 1], [2, 3]], or None (by host name)"


@pytest.mark.parametrize(
    ("name", "must_be", "values"),
    [
        ("ranks_per_node", "1 or more ranks, or None (by host name)", [0, -2, True, 2.0, "2"]),
        ("hierarchical", FORMS, ["yes", "Leader", 1, None, 0]),
        ("rank_groups", GROUPS, [[0, 1, 2, 3], [[0, 1], 2, 3], 4, [], [[0, 1], []], "01"]),
        ("rank_groups", GROUPS, [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [["0", "1"], ["2", "3"]]]),
        ("rank_groups", GROUPS, [[[0, 1], [2, 3.0]], [[0, True]], {0: [1]}]),
    ],
)
def test_settings_of_groups_have_their_types(name: str, must_be: str, values: list[Any]) -> None:
    for value in values:
        told = message(ExchangeSettings, **{name: value})
        assert told == f"{name} must be {must_be}, got {value!r}"


@pytest.mark.parametrize(
    "codec", [{"intra": "bf16"}, {"inter": "int8"}, {}, {"intra": "bf16", "inter": "int8", "x": 1}]
)
def test_a_codec_for_each_level_has_two_keys(codec: Any) -> None:
    text = message(ExchangeSettings, codec)
    assert text.startswith("A codec for each level is {'intra': inside a node, 'inter': between")
    assert text.endswith(
        f"got the keys {sorted(codec)}; policies are by_size, by_name, warmup, after_steps"
    )


def test_codecs_that_do_not_fit_inside() -> None:
    for intra in set(CODECS) - {"none", "fp16", "bf16"}:
        assert message(ExchangeSettings, {"intra": intra, "inter": "int8"}) == (
            "Inside a node gradients are summed without decoding, so 'intra' must be one of none, "
            f"fp16, bf16, got {intra!r}; give it to 'inter'"
        )


def test_codecs_of_levels_need_levels() -> None:
    levels = {"intra": "bf16", "inter": "int8"}
    assert "with hierarchical=False; give one codec" in message(
        ExchangeSettings, levels, hierarchical=False
    )
    for nodes, counts in (("aaaa", "1 node x 4 ranks"), ("abcd", "4 nodes x 1 rank")):
        text = message(grouped, nodes, codec=levels)
        assert text.startswith("A codec for each level needs several nodes")
        assert counts in text
    assert grouped("aaaa", codec={"intra": "none", "inter": "int8"}) is None
    assert grouped("aabb", codec=levels) == ((0, 1), (2, 3))


TREES: dict[str, Any] = {
    "aabb": ((0, 1), (2, 3)),
    "abab": ((0, 2), (1, 3)),
    "aaab": ((0, 1, 2), (3,)),
    "abbc": ((0,), (1, 2), (3,)),
    "aaaa": None,
    "abcd": None,
    "a": None,
}


def test_auto_is_hierarchical_where_there_are_two_levels() -> None:
    for nodes, tree in TREES.items():
        assert grouped(nodes) == tree
        assert grouped(nodes, hierarchical=False) is None
        if tree is not None:
            assert grouped(nodes, hierarchical=True) == tree
            assert grouped(nodes, hierarchical="leader") == tree
    two_sites = [[0, 1], [2, 3]]
    assert grouped("abcd", rank_groups=two_sites) == ((0, 1), (2, 3)), "they need not be nodes"


def test_a_launcher_that_contradicts_the_names(caplog: pytest.LogCaptureFixture) -> None:
    """The names are used and rank 0 warns, unless a hierarchy was asked for."""
    claims = [Claim("torchrun", rank // 2, 2).as_fact() for rank in range(4)]
    said = "torchrun reports ranks 0 to 3 on nodes [0, 0, 1, 1], but their host names"
    assert grouped("xxxx", claims=claims) is None
    assert said in caplog.text
    assert "ranks_per_node=" in caplog.text
    caplog.clear()
    assert said in message(grouped, "xxxx", claims=claims, hierarchical=True)
    assert grouped("xxxx", claims=claims, ranks_per_node=2) == ((0, 1), (2, 3))
    assert grouped("xxxx", claims=claims, hierarchical=False) is None
    assert not caplog.text, "what was declared needs no names"


def attached(rank: Rank, tree: Any = None, **settings: Any) -> Any:
    model = rank.ddp(nn.Linear(2, 2))
    return compress_ddp(model, groups=rank.groups(tree), **settings)


@pytest.mark.parametrize(
    ("first", "others", "views"),
    [
        (
            {"ranks_per_node": 2},
            {"ranks_per_node": 1},
            ["2 nodes x 2 ranks: ((0, 1), (2, 3))", "4 nodes x 1 rank: ((0,), (1,), (2,), (3,))"],
        ),
        (
            {"rank_groups": [[0, 1], [2, 3]]},
            {"rank_groups": [[0, 2], [1, 3]]},
            ["((0, 1), (2, 3))", "((0, 2), (1, 3))"],
        ),
        (
            {"ranks_per_node": 2},
            {},
            ["2 nodes x 2 ranks: ((0, 1), (2, 3))", "by host name"],
        ),
        (
            {"ranks_per_node": 3},
            {"ranks_per_node": 2},
            ["ranks_per_node=3", "2 nodes x 2 ranks: ((0, 1), (2, 3))"],
        ),
    ],
    ids=["per node", "groups", "one says nothing", "one is wrong"],
)
def test_ranks_that_see_different_groups(first: Any, others: Any, views: list[str]) -> None:
    """Both views are in the message of every rank."""
    text = told_to_all(lambda rank: others if rank else first)
    assert "groups: " in text
    assert all(view in text for view in views), text
    assert "on rank 0; " in text
    assert "on ranks 1, 2, 3" in text


def told_to_all(settings_of: Callable[[int], dict[str, Any]]) -> str:
    """What each of four ranks is told, and the same."""
    (text,) = set(run_threads(lambda rank: message(attached, rank, **settings_of(rank.rank)), 4))
    return text


def test_ranks_are_told_together_of_forms_that_differ_and_of_a_missing_rank() -> None:
    forms: list[Any] = [True, True, True, "leader"]
    text = told_to_all(lambda rank: {"ranks_per_node": 2, "hierarchical": forms[rank]})
    assert "hierarchical: True on ranks 0, 1, 2; 'leader' on rank 3" in text
    assert "missing [3]" in told_to_all(lambda rank: {"rank_groups": [[0, 1], [2]]})


@on_threads(4)
def test_groups_of_levels_must_be_those_of_the_levels(rank: Rank) -> None:
    """As rank 1 sees it."""
    model, both = rank.ddp(nn.Linear(2, 2)), rank.groups()
    levels, per_host = rank.groups([[0, 1], [2, 3]])[2:], {"ranks_per_node": 2}
    for groups, settings, says in (
        ([*both, levels[1]], per_host, r"one of the ranks \[0, 1\] in this .*got rank 0 of 2"),
        ([*both, levels[0]], per_host, r"rank 1 needs one of the ranks \[1, 3\] .*got none"),
        (both[:1], per_host, "groups must be two process groups or more, got 1$"),
        ([*both, *levels], {"hierarchical": False}, "a hierarchical exchange, got 2 of them"),
    ):
        told = message(compress_ddp, model, groups=groups, **settings)
        assert rank.rank != 1 or re.search(says, told), told


@pytest.mark.parametrize("nodes", ["aabb", "abab", "aaab", "aaaa", "abcd"])
def test_the_nodes_of_all_ranks_decide(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every rank calls its host is gathered, and the groups follow."""
    here = threading.local()
    monkeypatch.setattr(networks, "host_name", lambda: here.name)
    tree = TREES[nodes]

    def body(rank: Rank) -> None:
        here.name = nodes[rank.rank]
        reducer = attached(rank, tree)
        reducer.close()
        topology = reducer.network.topology
        assert (topology.intra_group is None) == (reducer.network.intra is None) == (tree is None)
        beside = [r for r, node in enumerate(nodes) if node == here.name]
        assert topology.local_ranks == tuple(beside)

    run_threads(body, len(nodes))


ORDERS = [[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[2, 3], [0, 1]], [[1, 0], [2, 3]], [[3, 0], [1, 2]]]
OF_TORCH: list[dict[str, Any]] = [
    *({"rank_groups": tree, "hierarchical": True} for tree in ORDERS),
    *[{"ranks_per_node": 2, "hierarchical": "leader"}] * 2,
    *[{"rank_groups": [[0, 1, 2], [3]]}] * 2,
    {"hierarchical": False},
]
"""Reducers are not taken over, so each one has groups of its own."""


@needs(ORDERED_GROUPS)
@pytest.mark.on_ranks(4)
def test_every_rank_has_the_mean_in_groups_that_torch_makes() -> None:
    """In any order of groups and ranks; also where ranks have made different numbers of groups."""
    dist.new_group([0, 1])  # ranks 2 and 3 have fewer groups than the others from here on
    for settings in OF_TORCH:
        module = nn.Linear(30, 50)
        model = DistributedDataParallel(module)
        reducer = compress_ddp(model, "none", **settings)
        model(torch.full((1, 30), float(dist.get_rank()))).sum().backward()
        reducer.close()
        assert module.weight.grad is not None
        assert (module.weight.grad == 1.5).all(), settings


@needs(ORDERED_GROUPS)
@pytest.mark.on_ranks(4)
def test_no_rank_goes_on_before_all_have_their_groups() -> None:
    """It could give them up at once, and close what another one is connecting to."""
    world, store = dist.group.WORLD, _get_default_store()
    assert world is not None
    make = networks._new_group

    def late(like: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
        group = make(like, ranks)
        if tuple(ranks) == (1, 3) and dist.get_rank() == 3:
            with pytest.raises(dist.DistStoreError):
                store.wait(["another rank has gone on"], timedelta(seconds=0.3))
        return group

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(networks, "_new_group", late)
        settings = ExchangeSettings("none", ranks_per_node=2)
        networks.network_over(world, settings, device=torch.device("cpu"), facts={})
    store.set("another rank has gone on", "")


@pytest.fixture
def alone() -> Iterator[None]:
    if dist.is_initialized():  # Lightning leaves the group of a Trainer of another test
        assert dist.get_world_size() == 1
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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
        send_buffers(model, Channel(model.process_group))
    sent = [each.input_shapes for each in profile.events() if each.name == "gloo:broadcast"]
    counts, values = 19, 19 * 8  # without the last layer
    assert sorted(sent) == [[[counts]], [[values]]]
