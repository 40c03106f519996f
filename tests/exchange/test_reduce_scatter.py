"""Shares of any size: what ranks send reaches the owner, and the owner's result reaches all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs.base import Payload, Plane
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.rounds import Section, TwoShot
from lightning_dist.exchange.traffic import Sent, broadcasts, ring_all_gather, scatter
from lightning_dist.exchange.wire import row_bytes, views

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


def make(
    rank: Rank, planes: Sequence[Plane], blocks: Sequence[int], of: Sequence[Tensor]
) -> Shares:
    ready = iter(of)
    exchange = TwoShot(
        [row_bytes(planes, count) for count in blocks],
        channel=Channel(rank.group("inside")),
        topology=rank.topology(),
        device=torch.device("cpu"),
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
def test_every_share_goes_to_its_owner_and_comes_back(
    blocks: list[int], planes: tuple[Plane, ...]
) -> None:
    """Twice, since buffers are used again."""

    def body(rank: Rank) -> None:
        shares = make(rank, planes, blocks, memory(planes, blocks, rank.rank))
        for salt in (1, 2):
            begin(shares, rank, planes, salt=salt)
            reduce(shares, rank, planes, blocks[rank.rank], salt)
            finish(shares, rank, planes, blocks, salt)

    run_threads(body, len(blocks))


def test_exchanges_in_turn_share_memory() -> None:
    """The first is done with it before the second begins; shares of other sizes."""

    def body(rank: Rank) -> None:
        large, small = [6, 1, 3], [0, 4, 1]
        of = memory(FLOAT, [6, 6, 6], rank.rank)
        first = make(rank, FLOAT, large, of)
        second = make(rank, SCALED, small, of)
        for salt in (1, 2):
            for shares, planes, blocks in ((first, FLOAT, large), (second, SCALED, small)):
                begin(shares, rank, planes, salt=salt)
                reduce(shares, rank, planes, blocks[rank.rank], salt)
                finish(shares, rank, planes, blocks, salt)

    run_threads(body, 3)


def test_two_exchanges_may_be_under_way() -> None:
    """With memory of their own, as consecutive units are."""

    def body(rank: Rank) -> None:
        of = {1: ([2, 2, 2], FLOAT), 2: ([5, 0, 1], SCALED)}
        made = {
            salt: make(rank, planes, blocks, memory(planes, blocks, rank.rank))
            for salt, (blocks, planes) in of.items()
        }
        steps = (
            lambda shares, salt, blocks, planes: begin(shares, rank, planes, salt=salt),
            lambda shares, salt, blocks, planes: reduce(
                shares, rank, planes, blocks[rank.rank], salt
            ),
            lambda shares, salt, blocks, planes: finish(shares, rank, planes, blocks, salt),
        )
        for step in steps:
            for salt, shares in made.items():
                step(shares, salt, *of[salt])

    run_threads(body, 3)


@cases
@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_bytes_are_those_of_the_formulas(blocks: list[int], per_host: int) -> None:
    of_ranks = [row_bytes(SCALED, count) for count in blocks]

    def body(rank: Rank) -> Sent:
        shares = make(rank, SCALED, blocks, memory(SCALED, blocks, rank.rank))
        if len(set(of_ranks)) == 1:
            results = ring_all_gather(of_ranks[0], rank.topology())
        else:
            results = broadcasts(of_ranks, rank.topology())
        assert shares.exchange.sent == shares.section.sent
        assert shares.exchange.sent == scatter(of_ranks, rank.topology()) + results
        return shares.exchange.sent

    ranks = run_threads(body, len(blocks), ranks_per_host=per_host)
    assert sum(sent.total for sent in ranks) == 2 * (len(blocks) - 1) * sum(of_ranks)
