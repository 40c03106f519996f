"""Exchanges move bytes: what every rank receives, in which order, and that all receive the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import Int8, Payload, Plane
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.rounds import AllGather, AllReduce, Exchange, TwoShot
from lightning_dist.exchange.wire import row_bytes

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
def test_gather_brings_all_payloads_in_rank_order(size: int) -> None:
    def body(rank: Rank) -> list[list[list[int]]]:
        make = {"channel": Channel(rank.group("data")), "topology": rank.topology(), "device": CPU}
        exchange = AllGather(ROW, **make)
        section = exchange.section(PLANES, BLOCKS)
        received = []
        for step in range(2):  # buffers are reused
            fill(section.own, rank.rank + 1 + step)
            run(exchange)
            received.append([numbers(payload)[0] for payload in section.payloads])
        return received

    first, second = ([[10 * (r + 1 + step)] for r in range(size)] for step in range(2))
    assert run_threads(body, size) == [[first, second]] * size


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
def test_many_in_flight_do_not_mix(size: int) -> None:
    """Eight exchanges issued, then advanced, then awaited: each gets its own bytes."""

    def body(rank: Rank) -> list[list[list[int]]]:
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
        return [numbers(section.payloads[0]) for section in sections]

    assert run_threads(body, size) == [[[[number] * size] for number in range(8)]] * size
