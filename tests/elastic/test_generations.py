"""A worker in one generation after the other, over a TCPStore."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.member import Member, RecoveryEnvironment
from lightning_dist.elastic.recovery.protocol import Generation, Worker


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Generations]:
    """Of a worker whose peers are lost before it meets them."""

    def lose(member: Member) -> None:
        raise RuntimeError("a member was lost")

    monkeypatch.setattr(Member, "meet", lose)
    limit = timedelta(seconds=30)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
    worker = Worker(0, 0, 0)
    found = Generations(RecoveryEnvironment("127.0.0.1", server.port, worker))
    yield found
    found._member._stop()


def enter(generations: Generations, number: int, *, size: int) -> None:
    names = tuple(str(Worker(0, rank, 0)) for rank in range(size))
    generations.enter(Generation(number, members=names), has_state=True)


def test_as_many_ranks_may_be_lost_in_a_step_as_there_are(generations: Generations) -> None:
    for number, size in enumerate(range(12, 1, -1)):
        with pytest.raises(RuntimeError, match="a member was lost"):
            enter(generations, number, size=size)


def test_a_step_that_fails_again_and_again_is_an_error(generations: Generations) -> None:
    for number in range(5):
        with pytest.raises(RuntimeError, match="a member was lost"):
            enter(generations, number, size=3)
    with pytest.raises(RuntimeError, match="5 generations of the same step have failed"):
        enter(generations, 5, size=3)
