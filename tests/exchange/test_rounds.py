"""Exchanges move bytes: planes of a buffer, what every rank gets; ranks that differ are named."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threads import on_threads
from worlds import Rank, run_threads

from lightning_dist.base import exchanges
from lightning_dist.base.exchanges import EXCHANGES, ExchangeKind, register_exchange
from lightning_dist.codecs import FP16, Int8, Payload, Plane
from lightning_dist.exchange import rounds
from lightning_dist.exchange.rounds import (
    AllGather,
    AllReduce,
    Exchange,
    TwoShot,
    replicate,
    row_bytes,
    views,
)
from lightning_dist.ranks import Topology, host_name
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.facts import Facts, all_facts, require_equal
from lightning_dist.ranks.traffic import (
    Sent,
    all_to_all,
    broadcasts,
    ring_all_gather,
    ring_allreduce,
    scatter,
)
from lightning_dist.settings.exchange import ExchangeSettings

_DTYPES = [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
_planes = st.builds(Plane, st.sampled_from(_DTYPES), st.integers(1, 17))
layouts = given(
    planes=st.lists(_planes, min_size=1, max_size=4),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 9),
)


def pattern(number: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes that no other plane or place has, as far as a byte can tell."""
    return torch.arange(like.nbytes).mul(31).add(number * 7 + 1).to(torch.uint8)


@layouts
def test_planes_lie_apart_in_the_buffer(planes: list[Plane], rows: int, blocks: int) -> None:
    """Each in its dtype, aligned, and up to 7 bytes after it stay free."""
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    payload = views(buffer, planes, blocks)
    for number, (plane, view) in enumerate(zip(planes, payload, strict=True)):
        assert (view.dtype, view.shape) == (plane.dtype, (rows, blocks, plane.per_block))
        assert all(row.data_ptr() % view.itemsize == 0 for row in view)
        view.copy_(pattern(number, view).view(view.dtype).view(view.shape))
    for number, view in enumerate(payload):
        read = view.contiguous().view(torch.uint8).view(-1)
        assert torch.equal(read, pattern(number, view)), "another plane has written there"
        ones = torch.full((view.nbytes,), 255, dtype=torch.uint8)
        view.copy_(ones.view(view.dtype).view(view.shape))
    payload_bytes = sum(plane.bytes_per_block for plane in planes) * blocks
    assert (buffer == 255).sum(1).tolist() == [payload_bytes] * rows
    assert payload_bytes <= row_bytes(planes, blocks) <= payload_bytes + 7 * len(planes)


def test_a_buffer_of_another_size_is_refused() -> None:
    planes = [Plane(torch.float32, 4)]
    with pytest.raises(RuntimeError):
        views(torch.zeros(1, row_bytes(planes, 2) - 8, dtype=torch.uint8), planes, 2)


GATHER = EXCHANGES["gather"]


def mine(implementation: type = rounds.AllGather) -> ExchangeKind:
    return replace(GATHER, name="mine", implementation=implementation)


def test_rows_are_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "EXCHANGES", dict(EXCHANGES))
    register_exchange(mine())
    register_exchange(mine())  # a module that is imported again
    assert list(exchanges.EXCHANGES) == ["allreduce", "gather", "two_shot", "mine"]
    with pytest.raises(ValueError, match=r"must not be taken, got 'mine' for .*:TwoShot, .*:AllGa"):
        register_exchange(mine(rounds.TwoShot))
    with pytest.raises(ValueError, match="must not be taken, got 'gather'"):
        register_exchange(replace(mine(rounds.TwoShot), name="gather"))


def test_two_ranks_gather_where_more_use_two_shots() -> None:
    kind = EXCHANGES["two_shot"]
    assert [kind.among(ranks).name for ranks in (2, 3)] == ["gather", "two_shot"]
    assert [kind.among(ranks).rows(ranks) for ranks in (1, 2, 3)] == [1, 1, 3]
    assert [kind.among(ranks).received(ranks) for ranks in (2, 3)] == [2, 1]
    assert [EXCHANGES["allreduce"].received(ranks) for ranks in (2, 3)] == [1, 1]


CPU = torch.device("cpu")
PLANES = Int8(block_size=16).planes(torch.float32)
BLOCKS = 3
worlds = pytest.mark.parametrize("size", [2, 3, 4])


def fill(payload: Payload, number: int) -> None:
    """Every row and plane gets values that tell the writer and the row."""
    for plane in payload:
        for row, values in enumerate(plane):
            values.fill_(10 * number + row)


def numbers(payload: Payload) -> list[list[int]]:
    """The values of each row, which must be the same in the whole row of every plane."""
    rows = torch.cat([plane.float().flatten(1) for plane in payload], dim=1)
    assert (rows == rows[:, :1]).all()
    return [rows[:, 0].int().tolist()]


def run(exchange: Exchange) -> None:
    exchange.start()
    exchange.start_second()
    exchange.wait()


def basics(rank: Rank) -> dict[str, Any]:
    """Arguments of every exchange."""
    return {"channel": Channel(rank.group("data")), "topology": rank.topology(), "device": CPU}


ROW = row_bytes(PLANES, BLOCKS)


@worlds
@on_threads("size")
def test_gather_brings_all_payloads_in_rank_order(rank: Rank, size: int) -> None:
    first, second = ([[10 * (r + 1 + step)] for r in range(size)] for step in range(2))
    exchange = AllGather(ROW, **basics(rank))
    section = exchange.section(PLANES, BLOCKS)
    received = []
    for step in range(2):  # buffers are reused
        fill(section.own, rank.rank + 1 + step)
        run(exchange)
        received.append([numbers(payload)[0] for payload in section.payloads])
    assert received == [first, second]


@worlds
@pytest.mark.parametrize("keep_own", [False, True])
@on_threads("size")
def test_all_reduce_adds(rank: Rank, size: int, keep_own: bool) -> None:
    """The sum arrives everywhere; `keep_own` leaves what this rank encoded as it was."""
    exchange = AllReduce([Plane(torch.float16, 1)], 8, keep_own=keep_own, **basics(rank))
    for _ in range(2):
        exchange.whole.own[0].fill_(rank.rank + 1)
        run(exchange)
    ((summed,),) = exchange.whole.payloads
    total = size * (size + 1) / 2
    assert (summed == total).all()
    assert (exchange.whole.own[0] == (rank.rank + 1 if keep_own else total)).all()


@on_threads(2)
def test_all_reduce_in_place_uses_no_second_buffer(rank: Rank) -> None:
    buffer, plane = torch.full((1, 5, 1), rank.rank + 1.0), Plane(torch.float32, 1)
    exchange = AllReduce([plane], 5, keep_own=False, in_place=buffer, **basics(rank))
    assert exchange.whole.own[0].data_ptr() == buffer.data_ptr()
    run(exchange)
    assert (buffer == 3).all()


@worlds
@pytest.mark.parametrize("keep_own", [False, True])
@on_threads("size")
def test_two_shots_in_flight_do_not_mix(rank: Rank, size: int, keep_own: bool) -> None:
    """Eight exchanges issued, then advanced, then awaited: each gets its own bytes.

    An owner sees, in rank order, what each rank wrote for it; means come in rank order.
    """
    exchanges = [TwoShot([ROW] * size, keep_own=keep_own, **basics(rank)) for _ in range(8)]
    sections = [exchange.section(PLANES, BLOCKS) for exchange in exchanges]
    for number, (exchange, section) in enumerate(zip(exchanges, sections, strict=True)):
        fill(section.own, rank.rank + number)
        exchange.start()
    for number, (exchange, section) in enumerate(zip(exchanges, sections, strict=True)):
        exchange.wait()
        seen = numbers(section.received[0])
        assert seen == [[10 * (sender + number) + rank.rank for sender in range(size)]]
        fill(section.mean, rank.rank + number + 1)
        exchange.start_second()
    for number, (exchange, section) in enumerate(zip(exchanges, sections, strict=True)):
        exchange.wait()
        means = numbers(section.payloads[0])
        assert means == [[10 * (owner + number + 1) for owner in range(size)]]
        if keep_own:
            assert numbers(section.own) == [[10 * (rank.rank + number) + r for r in range(size)]]


FORMULAS = [ring_allreduce, ring_all_gather, all_to_all]


def world(nodes: str) -> list[Topology]:
    """``"aabb"``: ranks 0 and 1 on node a, 2 and 3 on node b."""
    return [Topology(tuple(nodes), rank) for rank in range(len(nodes))]


@pytest.mark.parametrize(
    ("nodes", "allreduce", "gather", "to_all"),
    [
        ("a", [Sent()], [Sent()], [Sent()]),
        ("aaaa", [Sent(intra=1200)], [Sent(intra=2400)], [Sent(intra=600)]),
        ("abcd", [Sent(inter=1200)], [Sent(inter=2400)], [Sent(inter=600)]),
        (
            "aabb",  # a ring leaves the node at its last rank only
            [Sent(intra=1200), Sent(inter=1200)],
            [Sent(intra=2400), Sent(inter=2400)],
            [Sent(intra=200, inter=400)],
        ),
    ],
)
def test_what_leaves_the_host(
    nodes: str, allreduce: list[Sent], gather: list[Sent], to_all: list[Sent]
) -> None:
    """Of 800 bytes, by rank; a shorter list begins again."""
    for rank, topology in enumerate(world(nodes)):
        assert ring_allreduce(800, topology) == allreduce[rank % len(allreduce)]
        assert ring_all_gather(800, topology) == gather[rank % len(gather)]
        assert all_to_all(800, topology) == to_all[0]


@given(st.text("abc", min_size=2, max_size=6), st.integers(1, 1000))
def test_hosts_change_where_bytes_go_and_not_how_many(nodes: str, blocks: int) -> None:
    nbytes = blocks * len(nodes)
    for formula in FORMULAS:
        flat = formula(nbytes, Topology(tuple("x" * len(nodes)), 0)).total
        assert {formula(nbytes, topology).total for topology in world(nodes)} == {flat}


def test_shares_of_any_size() -> None:
    """Two nodes of two: to each other rank its share, from each owner its own to all others."""
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
def test_all_shares_reach_all_other_ranks(nodes: str, random: Random) -> None:
    shares = [random.choice([0, 8, 24]) for _ in nodes]
    for way in (scatter, broadcasts):
        total = sum(way(shares, topology).total for topology in world(nodes))
        assert total == (len(nodes) - 1) * sum(shares)


def test_the_host_name_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several nodes report one name."""
    monkeypatch.setenv("LIGHTNING_DIST_HOSTNAME", "left")
    assert host_name() == "left"
    monkeypatch.delenv("LIGHTNING_DIST_HOSTNAME")
    assert host_name() != "left"


INT8 = ExchangeSettings(Int8()).fingerprint()


@pytest.mark.parametrize("size", [2, 3, 4])
@on_threads("size")
def test_every_rank_learns_all_facts_in_rank_order(rank: Rank, size: int) -> None:
    """Also when the texts differ in length, in type and in script."""

    def facts_of(rank: int) -> Facts:
        return {"rank": rank, "text": "é" * 10 * rank, "none": None, "list": [rank, 0.5]}

    assert all_facts(facts_of(rank.rank), group=rank.group("data"), device=CPU) == [
        facts_of(rank) for rank in range(size)
    ]


def test_equal_facts_pass() -> None:
    require_equal([INT8, dict(INT8), dict(INT8)])


@pytest.mark.parametrize(
    ("others", "line"),
    [
        (
            ExchangeSettings(FP16()).fingerprint(),
            "codec: 'int8' on ranks 0, 2; 'fp16' on rank 1",
        ),
        (
            ExchangeSettings(Int8(128)).fingerprint(),
            "codec: 'int8' on ranks 0, 2; 'int8:block_size=128' on rank 1",
        ),
        ({**INT8, "lightning_dist": "9.9"}, "; '9.9' on rank 1"),
        ({**INT8, "start_step": 7}, "start_step: 0 on ranks 0, 2; 7 on rank 1"),
    ],
    ids=["codec", "block", "version", "start"],
)
def test_a_difference_is_named_on_every_rank(others: Facts, line: str) -> None:
    def body(rank: Rank) -> str:
        mine = others if rank.rank == 1 else INT8
        facts = all_facts(mine, group=rank.group("data"), device=CPU)
        with pytest.raises(ValueError, match="All ranks must compress in the same way") as error:
            require_equal(facts)
        return str(error.value)

    messages = run_threads(body, 3)
    assert messages == [messages[0]] * 3
    assert line in messages[0]
    assert "Give every rank the same settings" in messages[0]


def test_several_differences_are_all_named() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)a: 1 on rank 0; 2 on rank 1\n.*b: 1 on rank 0; None"
    ):
        require_equal([{"a": 1, "b": 1, "c": 1}, {"a": 2, "c": 1}])


def test_a_fact_that_only_another_rank_has_is_named() -> None:
    """The same law when the first rank is the one that lacks it."""
    with pytest.raises(ValueError, match="b: None on rank 0; 1 on rank 1"):
        require_equal([{"a": 1}, {"a": 1, "b": 1}])


@on_threads(2)
def test_tensors_are_replicated_whatever_their_strides(rank: Rank) -> None:
    """Nothing beside them in memory is written."""
    memory = torch.arange(24.0).mul(1 + rank.rank)
    tensors = {
        "contiguous": memory[:4],
        "every other column": memory[4:12].view(2, 4)[:, ::2],
        "transposed": memory[12:18].view(2, 3).T,
        "expanded": memory[18:19].expand(1000, 1),
        "expanded over rows": memory[19:22].view(3, 1).expand(3, 50),
        "empty": memory[:0],
        "of no dimension": memory[22],
    }
    own = memory.clone()
    replicate(tensors, Channel(rank.group("payload")))
    beside = [5, 7, 9, 11, 23]  # columns that are left out, and what no tensor has
    assert torch.equal(memory[beside], own[beside])
    rest = [place for place in range(24) if place not in beside]
    assert torch.equal(memory[rest], torch.arange(24.0)[rest])
    overlapping = {"windows": memory[:10].unfold(0, 4, 2)}
    with pytest.raises(ValueError, match=r"'windows' must not have elements that overlap.*clone"):
        replicate(overlapping, Channel(rank.group("payload")))
