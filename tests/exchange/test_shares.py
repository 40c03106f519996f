"""Payloads of a length that only the sender knows, and shares of any size."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from threads import on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs.base import Payload, Plane
from lightning_dist.exchange.rounds import AllGatherV, Section, TwoShot, row_bytes, views
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.traffic import Sent, broadcasts, ring_all_gather, scatter

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

DTYPES = [
    (torch.int64, torch.float64),
    (torch.int32, torch.float32),
    (torch.uint8, torch.float16),
    (torch.uint8,),
    (torch.int32, torch.int8, torch.bfloat16),
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


def make_gather(rank: Rank) -> AllGatherV:
    return AllGatherV(channel=Channel(rank.group("data")), topology=rank.topology(), device=CPU)


def require(found: Sequence[Payload], lengths: Lengths, dtypes: Sequence[torch.dtype]) -> None:
    assert len(found) == len(lengths)
    for rank, (received, length) in enumerate(zip(found, lengths, strict=True)):
        for plane, expected in zip(received, payload(rank, length, dtypes), strict=True):
            assert plane.dtype == expected.dtype
            assert torch.equal(plane, expected)


@pytest.mark.parametrize(
    ("lengths", "dtypes"),
    [
        *((lengths, (torch.int32, torch.bfloat16)) for lengths in LENGTHS),
        *(((5, 0, 3), dtypes) for dtypes in DTYPES),
    ],
    ids=str,
)
@on_threads("lengths")
def test_every_rank_receives_every_payload_in_rank_order(
    rank: Rank, lengths: Lengths, dtypes: Sequence[torch.dtype]
) -> None:
    exchange = make_gather(rank)
    found = run(exchange, payload(rank.rank, lengths[rank.rank], dtypes))
    require(found, lengths, dtypes)
    # The length, then all planes padded to the longest; nothing where all are empty.
    longest = max(lengths) * sum(dtype.itemsize for dtype in dtypes)
    assert exchange.sent.total == (rank.size - 1) * (LENGTH + longest)


@on_threads(3)
def test_it_moves_bits_and_not_numbers(rank: Rank) -> None:
    """NaN with a payload, infinities, a negative zero."""
    bits = torch.tensor([0x7FC12345, 0x7F800000, -(1 << 31), 1, -1], dtype=torch.int32)
    given = bits.view(torch.float32)[: 5 - rank.rank]
    assert torch.equal(run(make_gather(rank), (given,))[0][0].view(torch.int32), bits)


@on_threads(2)
def test_lengths_change_from_step_to_step(rank: Rank) -> None:
    """Among them steps without anything after steps with something; bytes are of one step."""
    steps: list[Lengths] = [(3, 1), (0, 0), (0, 8), (0, 0), (2, 2)]
    dtypes = (torch.int32, torch.float32)
    exchange = make_gather(rank)
    for lengths in steps:
        found = run(exchange, payload(rank.rank, lengths[rank.rank], dtypes))
        require(found, lengths, dtypes)
        assert exchange.sent.total == LENGTH + max(lengths) * 8


@on_threads(3)
def test_many_in_flight_do_not_mix(rank: Rank) -> None:
    """Issued, then advanced, then awaited, of other lengths: each gets its own."""
    dtypes = (torch.int32, torch.bfloat16)
    of_each: list[Lengths] = [(n % 4, (n * 2) % 5, (n * 3) % 7) for n in range(8)]
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
    for exchange, lengths in zip(exchanges, of_each, strict=True):
        require(exchange.payloads, lengths, dtypes)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_bytes_that_leave_the_host_are_counted_separately(ranks_per_node: int) -> None:
    """A ring: only what goes to the next rank counts, and that is on one node or on another."""

    def body(rank: Rank) -> tuple[int, int]:
        exchange = make_gather(rank)
        run(exchange, payload(rank.rank, rank.rank, (torch.int32,)))
        return exchange.sent.intra, exchange.sent.inter

    total = 3 * (LENGTH + 3 * 4)
    for rank, sent in enumerate(run_threads(body, 4, ranks_per_node=ranks_per_node)):
        leaves = ranks_per_node == 1 or rank % 2 == 1
        assert sent == ((0, total) if leaves else (total, 0))


FLOAT = (Plane(torch.float32, 3),)

SCALED = (Plane(torch.bfloat16, 1), Plane(torch.uint8, 5))  # planes that need padding

WIDE = (Plane(torch.float64, 1),)

CASES = [
    [4, 4],
    [4, 4, 4],
    [5, 2, 1],
    [3, 0, 2],
    [0, 0, 7],
    [6, 0, 0, 0],  # the leader form
    [0, 0, 0],
    [1],
]

cases = pytest.mark.parametrize("blocks", CASES, ids=str)

planes_ = pytest.mark.parametrize("planes", [FLOAT, SCALED, WIDE], ids=["one", "two", "wide"])


def payload_of(planes: Sequence[Plane], blocks: int, *, by: int, to: int, salt: int = 0) -> Payload:
    """What rank ``by`` says of the share of ``to``: random bits, the same wherever asked for."""
    generator = torch.Generator().manual_seed(1000 * salt + 100 * by + to)
    return tuple(
        torch.randint(0, 100, (1, blocks, p.per_block), generator=generator).to(p.dtype)
        for p in planes
    )


def memory(planes: Sequence[Plane], blocks: Sequence[int], rank: int) -> list[Tensor]:
    """Larger than needed and not zero: what was there before does not matter."""
    of_ranks = [row_bytes(planes, count) for count in blocks]
    sizes = [sum(of_ranks), len(of_ranks) * of_ranks[rank]]
    return [torch.full((size + 40,), 0xAB, dtype=torch.uint8) for size in sizes]


class Shares(NamedTuple):
    """An exchange, and views of all of it."""

    exchange: TwoShot
    section: Section


def make_shares(
    rank: Rank, planes: Sequence[Plane], blocks: Sequence[int], of: Sequence[Tensor]
) -> Shares:
    ready = iter(of)
    exchange = TwoShot(
        [row_bytes(planes, count) for count in blocks],
        channel=Channel(rank.group("inside")),
        topology=rank.topology(),
        device=CPU,
        allocate=lambda size: next(ready)[:size],
    )
    payloads = [
        views(part.unsqueeze(0), planes, count)
        for part, count in zip(exchange.parts, blocks, strict=True)
    ]
    received = [
        views(row, planes, blocks[rank.rank]) for row in exchange.received_bytes.unsqueeze(1)
    ]
    sent = exchange.sent_for([row_bytes(planes, count) for count in blocks])
    return Shares(exchange, Section((), payloads, sent, received, payloads[rank.rank]))


def begin(shares: Shares, rank: Rank, planes: Sequence[Plane], *, salt: int = 0) -> None:
    for owner, payload in enumerate(shares.section.payloads):
        blocks = payload[0].shape[1]
        values = payload_of(planes, blocks, by=rank.rank, to=owner, salt=salt)
        for plane, value in zip(payload, values, strict=True):
            plane.copy_(value)
    shares.exchange.start()


def reduce(shares: Shares, rank: Rank, planes: Sequence[Plane], blocks: int, salt: int) -> None:
    """Check what arrived, and answer with the sum of it."""
    shares.exchange.wait()
    assert len(shares.section.received) == rank.size
    for sender, payload in enumerate(shares.section.received):
        expected = payload_of(planes, blocks, by=sender, to=rank.rank, salt=salt)
        assert all(map(torch.equal, payload, expected))
    for plane, total in zip(
        shares.section.mean, answer(planes, blocks, rank.rank, rank.size, salt), strict=True
    ):
        plane.copy_(total)
    shares.exchange.start_second()


def answer(planes: Sequence[Plane], blocks: int, owner: int, size: int, salt: int) -> list[Tensor]:
    of_ranks = [payload_of(planes, blocks, by=by, to=owner, salt=salt) for by in range(size)]
    return [torch.stack(parts).sum(0).to(parts[0].dtype) for parts in zip(*of_ranks, strict=True)]


def finish(
    shares: Shares,
    rank: Rank,
    planes: Sequence[Plane],
    blocks: Sequence[int],
    salt: int,
) -> None:
    shares.exchange.wait()
    for owner, payload in enumerate(shares.section.payloads):
        expected = answer(planes, blocks[owner], owner, rank.size, salt)
        assert all(map(torch.equal, payload, expected))


@cases
@planes_
@on_threads("blocks")
def test_every_share_goes_to_its_owner_and_comes_back(
    rank: Rank, blocks: list[int], planes: tuple[Plane, ...]
) -> None:
    """Twice, since buffers are used again."""
    shares = make_shares(rank, planes, blocks, memory(planes, blocks, rank.rank))
    for salt in (1, 2):
        begin(shares, rank, planes, salt=salt)
        reduce(shares, rank, planes, blocks[rank.rank], salt)
        finish(shares, rank, planes, blocks, salt)


@on_threads(3)
def test_exchanges_in_turn_share_memory(rank: Rank) -> None:
    """The first is done with it before the second begins; shares of other sizes."""
    large, small = [6, 1, 3], [0, 4, 1]
    of = memory(FLOAT, [6, 6, 6], rank.rank)
    first = make_shares(rank, FLOAT, large, of)
    second = make_shares(rank, SCALED, small, of)
    for salt in (1, 2):
        for shares, planes, blocks in ((first, FLOAT, large), (second, SCALED, small)):
            begin(shares, rank, planes, salt=salt)
            reduce(shares, rank, planes, blocks[rank.rank], salt)
            finish(shares, rank, planes, blocks, salt)


@cases
@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_bytes_are_those_of_the_formulas(blocks: list[int], per_host: int) -> None:
    of_ranks = [row_bytes(SCALED, count) for count in blocks]

    def body(rank: Rank) -> Sent:
        shares = make_shares(rank, SCALED, blocks, memory(SCALED, blocks, rank.rank))
        if len(set(of_ranks)) == 1:
            results = ring_all_gather(of_ranks[0], rank.topology())
        else:
            results = broadcasts(of_ranks, rank.topology())
        assert shares.exchange.sent == shares.section.sent
        assert shares.exchange.sent == scatter(of_ranks, rank.topology()) + results
        return shares.exchange.sent

    ranks = run_threads(body, len(blocks), ranks_per_node=per_host)
    assert sum(sent.total for sent in ranks) == 2 * (len(blocks) - 1) * sum(of_ranks)
