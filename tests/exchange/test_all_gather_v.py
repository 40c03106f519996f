"""Payloads of a length that only the sender knows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import Payload
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.rounds import AllGatherV

Lengths = tuple[int, ...]

LENGTHS: list[Lengths] = [
    (0, 0),
    (1, 1),
    (0, 1),
    (7, 0),
    (3, 5),
    (0, 0, 0),
    (1, 0, 1),
    (0, 9, 2),
    (4, 4, 4),
    (0, 0, 0, 13),
]
CPU = torch.device("cpu")
LENGTH = 8  # bytes in which a rank tells its own


def payload(rank: int, length: int, dtypes: Sequence[torch.dtype]) -> Payload:
    """Numbers that tell the writer and the place, exact in every dtype."""
    return tuple((torch.arange(length) + 16 * rank).to(dtype) for dtype in dtypes)


def run(exchange: AllGatherV, own: Payload) -> Sequence[Payload]:
    exchange.own = own
    exchange.start()
    exchange.start_second()
    exchange.wait()
    return exchange.payloads


def make(rank: Rank) -> AllGatherV:
    return AllGatherV(channel=Channel(rank.group("data")), topology=rank.topology(), device=CPU)


def require(found: Sequence[Payload], lengths: Lengths, dtypes: Sequence[torch.dtype]) -> None:
    assert len(found) == len(lengths)
    for rank, (received, length) in enumerate(zip(found, lengths, strict=True)):
        for plane, expected in zip(received, payload(rank, length, dtypes), strict=True):
            assert plane.dtype == expected.dtype
            assert torch.equal(plane, expected)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_rank_receives_every_payload_in_rank_order(lengths: Lengths) -> None:
    dtypes = (torch.int32, torch.bfloat16)

    def body(rank: Rank) -> tuple[Sequence[Payload], int]:
        exchange = make(rank)
        found = run(exchange, payload(rank.rank, lengths[rank.rank], dtypes))
        return found, exchange.sent.total

    size = len(lengths)
    for found, sent in run_threads(body, size):
        require(found, lengths, dtypes)
        # The length, then both planes padded to the longest; nothing where all are empty.
        assert sent == (size - 1) * (LENGTH + max(lengths) * (4 + 2))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int64, torch.float64),
        (torch.int32, torch.float32),
        (torch.uint8, torch.float16),
        (torch.uint8,),
        (torch.int32, torch.int8, torch.bfloat16),
    ],
    ids=str,
)
def test_any_planes(dtypes: tuple[torch.dtype, ...]) -> None:
    lengths = (5, 0, 3)

    def body(rank: Rank) -> tuple[Sequence[Payload], int]:
        exchange = make(rank)
        found = run(exchange, payload(rank.rank, lengths[rank.rank], dtypes))
        return found, exchange.sent.total

    for found, sent in run_threads(body, 3):
        require(found, lengths, dtypes)
        assert sent == 2 * (LENGTH + 5 * sum(dtype.itemsize for dtype in dtypes))


def test_it_moves_bits_and_not_numbers() -> None:
    """NaN with a payload, infinities, a negative zero."""
    bits = torch.tensor([0x7FC12345, 0x7F800000, -(1 << 31), 1, -1], dtype=torch.int32)

    def body(rank: Rank) -> Tensor:
        given = bits.view(torch.float32)[: 5 - rank.rank]
        return run(make(rank), (given,))[0][0].view(torch.int32)

    assert all(torch.equal(found, bits) for found in run_threads(body, 3))


def test_lengths_change_from_step_to_step() -> None:
    """Among them steps without anything after steps with something; bytes are of one step."""
    steps: list[Lengths] = [(3, 1), (0, 0), (0, 8), (0, 0), (2, 2)]
    dtypes = (torch.int32, torch.float32)

    def body(rank: Rank) -> list[tuple[Sequence[Payload], int]]:
        exchange = make(rank)
        seen = []
        for lengths in steps:
            found = run(exchange, payload(rank.rank, lengths[rank.rank], dtypes))
            copies = [tuple(plane.clone() for plane in planes) for planes in found]
            seen.append((copies, exchange.sent.total))
        return seen

    for seen in run_threads(body, 2):
        for (found, sent), lengths in zip(seen, steps, strict=True):
            require(found, lengths, dtypes)
            assert sent == LENGTH + max(lengths) * 8


def test_many_in_flight_do_not_mix() -> None:
    """Issued, then advanced, then awaited, of other lengths: each gets its own."""
    dtypes = (torch.int32, torch.bfloat16)
    of_each: list[Lengths] = [(n % 4, (n * 2) % 5, (n * 3) % 7) for n in range(8)]

    def body(rank: Rank) -> list[Sequence[Payload]]:
        exchanges: list[AllGatherV] = []
        channel, topology = Channel(rank.group("data")), rank.topology()
        for lengths in of_each:
            exchanges.append(AllGatherV(channel=channel, topology=topology, device=CPU))
            exchanges[-1].own = payload(rank.rank, lengths[rank.rank], dtypes)
            exchanges[-1].start()
        for exchange in exchanges:
            exchange.start_second()
        for exchange in exchanges:
            exchange.wait()
        return [exchange.payloads for exchange in exchanges]

    for found in run_threads(body, 3):
        for payloads, lengths in zip(found, of_each, strict=True):
            require(payloads, lengths, dtypes)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_bytes_that_leave_the_host_are_counted_separately(ranks_per_host: int) -> None:
    """A ring: only what goes to the next rank counts, and that is on one host or on another."""

    def body(rank: Rank) -> tuple[int, int]:
        exchange = make(rank)
        run(exchange, payload(rank.rank, rank.rank, (torch.int32,)))
        return exchange.sent.intra, exchange.sent.inter

    total = 3 * (LENGTH + 3 * 4)
    for rank, sent in enumerate(run_threads(body, 4, ranks_per_host=ranks_per_host)):
        leaves = ranks_per_host == 1 or rank % 2 == 1
        assert sent == ((0, total) if leaves else (total, 0))
