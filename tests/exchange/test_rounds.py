"""Exchanges move bytes: the planes of a buffer, what every rank receives, and how many are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threads import on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist import exchanges
from lightning_dist.codecs import Int8, Payload, Plane
from lightning_dist.exchange import rounds
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.rounds import AllGather, AllReduce, Exchange, TwoShot
from lightning_dist.exchange.traffic import (
    Sent,
    all_to_all,
    broadcasts,
    ring_all_gather,
    ring_allreduce,
    scatter,
)
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.exchanges import EXCHANGES, ExchangeKind, register_exchange
from lightning_dist.topology import Topology, this_host

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
def test_shapes_and_dtypes(planes: list[Plane], rows: int, blocks: int) -> None:
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    got = [(view.dtype, tuple(view.shape)) for view in views(buffer, planes, blocks)]
    assert got == [(plane.dtype, (rows, blocks, plane.per_block)) for plane in planes]


@layouts
def test_planes_do_not_overlap(planes: list[Plane], rows: int, blocks: int) -> None:
    """What is written to each plane is still there after all others are written."""
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    payload = views(buffer, planes, blocks)
    for number, view in enumerate(payload):
        view.copy_(pattern(number, view).view(view.dtype).view(view.shape))
    for number, view in enumerate(payload):
        read = view.contiguous().view(torch.uint8).view(-1)
        assert torch.equal(read, pattern(number, view))


@layouts
def test_planes_cover_the_row(planes: list[Plane], rows: int, blocks: int) -> None:
    """Writing all planes writes every byte of the buffer but up to 7 after each plane."""
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    for view in views(buffer, planes, blocks):
        ones = torch.full((view.nbytes,), 255, dtype=torch.uint8)
        view.copy_(ones.view(view.dtype).view(view.shape))
    payload_bytes = sum(plane.bytes_per_block for plane in planes) * blocks
    assert (buffer == 255).sum(1).tolist() == [payload_bytes] * rows
    assert payload_bytes <= row_bytes(planes, blocks) <= payload_bytes + 7 * len(planes)


@layouts
def test_planes_are_aligned(planes: list[Plane], rows: int, blocks: int) -> None:
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    for view in views(buffer, planes, blocks):
        assert all(row.data_ptr() % view.itemsize == 0 for row in view)


@layouts
def test_views_follow_the_buffer(planes: list[Plane], rows: int, blocks: int) -> None:
    """A view shows what arrives later: collectives write into the buffer."""
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    payload = views(buffer, planes, blocks)
    buffer.fill_(1)
    for view in payload:
        assert (view.contiguous().view(torch.uint8) == 1).all()


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
    rows = [
        torch.cat([plane[row].float().flatten() for plane in payload]) for row in _rows(payload)
    ]
    assert all((row == row[0]).all() for row in rows)
    return [[int(row[0]) for row in rows]]


def _rows(payload: Payload) -> range:
    return range(len(payload[0]))


def run(exchange: Exchange) -> None:
    exchange.start()
    exchange.start_second()
    exchange.wait()


ROW = row_bytes(PLANES, BLOCKS)


@worlds
@on_threads("size")
def test_gather_brings_all_payloads_in_rank_order(rank: Rank, size: int) -> None:
    first, second = ([[10 * (r + 1 + step)] for r in range(size)] for step in range(2))
    make = {"channel": Channel(rank.group("data")), "topology": rank.topology(), "device": CPU}
    exchange = AllGather(ROW, **make)
    section = exchange.section(PLANES, BLOCKS)
    received = []
    for step in range(2):  # buffers are reused
        fill(section.own, rank.rank + 1 + step)
        run(exchange)
        received.append([numbers(payload)[0] for payload in section.payloads])
    assert received == [first, second]


@worlds
@pytest.mark.parametrize("keep_own", [False, True])
def test_two_shot_hands_each_rank_its_shards_and_all_ranks_the_means(
    size: int, keep_own: bool
) -> None:
    """An owner sees, in rank order, what each rank wrote for it; means come in rank order."""

    def body(rank: Rank) -> tuple[list[list[int]], list[list[int]]]:
        make = {"channel": Channel(rank.group("data")), "topology": rank.topology(), "device": CPU}
        exchange = TwoShot([ROW] * size, keep_own=keep_own, **make)
        section = exchange.section(PLANES, BLOCKS)
        fill(section.own, rank.rank + 1)
        exchange.start()
        exchange.wait()
        seen = numbers(section.received[0])
        fill(section.mean, rank.rank + 5)
        exchange.start_second()
        exchange.wait()
        if keep_own:
            own = numbers(section.own)
            assert own == [[10 * (rank.rank + 1) + r for r in range(size)]]
        return seen, numbers(section.payloads[0])

    for rank, (shards, means) in enumerate(run_threads(body, size)):
        assert shards == [[10 * (sender + 1) + rank for sender in range(size)]]
        assert means == [[10 * (owner + 5) for owner in range(size)]]


@worlds
@pytest.mark.parametrize("keep_own", [False, True])
def test_all_reduce_adds(size: int, keep_own: bool) -> None:
    """The sum arrives everywhere; `keep_own` leaves what this rank encoded as it was."""

    def body(rank: Rank) -> tuple[float, float]:
        make = {"channel": Channel(rank.group("data")), "topology": rank.topology(), "device": CPU}
        exchange = AllReduce([Plane(torch.float16, 1)], 8, keep_own=keep_own, **make)
        for _ in range(2):
            exchange.whole.own[0].fill_(rank.rank + 1)
            run(exchange)
        ((summed,),) = exchange.whole.payloads
        assert (summed == summed[0, 0]).all()
        return float(exchange.whole.own[0][0, 0, 0]), float(summed[0, 0, 0])

    total = size * (size + 1) / 2
    own = [rank + 1 if keep_own else total for rank in range(size)]
    assert run_threads(body, size) == [(mine, total) for mine in own]


def test_all_reduce_in_place_uses_no_second_buffer() -> None:
    def body(rank: Rank) -> Tensor:
        buffer = torch.full((1, 5, 1), rank.rank + 1.0)
        make = {"channel": Channel(rank.group("data")), "topology": rank.topology(), "device": CPU}
        plane = Plane(torch.float32, 1)
        exchange = AllReduce([plane], 5, keep_own=False, in_place=buffer, **make)
        assert exchange.whole.own[0].data_ptr() == buffer.data_ptr()
        run(exchange)
        return buffer

    assert all((buffer == 3).all() for buffer in run_threads(body, 2))


@worlds
@on_threads("size")
def test_many_in_flight_do_not_mix(rank: Rank, size: int) -> None:
    """Eight exchanges issued, then advanced, then awaited: each gets its own bytes."""
    make = {"channel": Channel(rank.group("data")), "topology": rank.topology(), "device": CPU}
    exchanges = [TwoShot([ROW] * size, **make) for _ in range(8)]
    sections = [exchange.section(PLANES, BLOCKS) for exchange in exchanges]
    for number, (exchange, section) in enumerate(zip(exchanges, sections, strict=True)):
        for plane in section.own:
            plane.fill_(number)
        exchange.start()
    for exchange, section in zip(exchanges, sections, strict=True):
        exchange.wait()
        for plane, out in zip(section.received[0], section.mean, strict=True):
            out.copy_(plane.float().mean(0, keepdim=True))
        exchange.start_second()
    for exchange in exchanges:
        exchange.wait()
    assert [numbers(section.payloads[0]) for section in sections] == [
        [[number] * size] for number in range(8)
    ]


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
