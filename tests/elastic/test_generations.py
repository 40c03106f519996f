"""A worker in one generation after the other, over a TCPStore."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from lightning_dist.elastic.recovery import member as member_module
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.member import Member, RecoveryEnvironment, StoreLostError
from lightning_dist.elastic.recovery.protocol import Generation, Report, Worker


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


@contextmanager
def member_of_another_process(
    report_timeout: float, beat_timeout: float = 5.0
) -> Iterator[tuple[Member, int]]:
    """A member, and the process that hosts its store, in which nobody makes generations."""
    reading, writing = os.pipe()
    if (host := os.fork()) == 0:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(server.port).encode())
        signal.pause()
    port = int(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    worker = Worker(0, 0, 0)
    environment = RecoveryEnvironment("127.0.0.1", port, worker, report_timeout, beat_timeout)
    member = Member(environment, on_broken=lambda: None)
    try:
        yield member, host
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
        member._stop()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("asks", ["finds_others", "announce", "report", "meet", "connect"])
def test_a_stopped_store_is_lost_within_the_report_timeout(asks: str) -> None:
    """torch waits for it without a bound, whatever the timeout of the client."""
    with member_of_another_process(0.3) as (member, host):
        os.kill(host, signal.SIGSTOP)
        os.waitpid(host, os.WUNTRACED)
        arguments = {"announce": [""], "report": [Report(member.name)]}.get(asks, [])
        with pytest.raises(StoreLostError, match=r"within 0\.3 s.*LIGHTNING_DIST_REPORT_TIMEOUT"):
            getattr(member, asks)(*arguments)


@pytest.mark.timeout(60)
def test_a_leader_may_write_as_long_as_its_beats_arrive() -> None:
    """After that it is evicted, and the next one writes."""
    with member_of_another_process(5.0, beat_timeout=1.5) as (member, host):
        member.generation = Generation(0, members=(member.name, "0.1.0"), leader=member.name)
        sent = member._answered
        while member._answered == sent:
            os.sched_yield()
        assert not member.lapsed()
        os.kill(host, signal.SIGSTOP)
        while not (why := member.lapsed()):
            os.sched_yield()
        assert why == "the launcher's store has not answered the leader for 3 s"
        member.generation = Generation(1, members=(member.name, "0.1.0"), leader="0.1.0")
        assert not member.lapsed()


@pytest.mark.timeout(60)
def test_a_report_that_no_generation_follows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers, and the launcher's coordinator does not."""
    monkeypatch.setattr(member_module, "_PATIENCE", 0.1)
    with (
        member_of_another_process(0.2) as (member, _),
        pytest.raises(StoreLostError, match=r"next generation within 0\.3 s.*got none"),
    ):
        member.report(Report(member.name))


def test_timeouts_are_those_of_the_launcher() -> None:
    variables = {
        "LIGHTNING_DIST_RECOVERY_STORE": "host:1",
        "LIGHTNING_DIST_WORKER": "0.1.0",
        "LIGHTNING_DIST_REPORT_TIMEOUT": "7",
        "LIGHTNING_DIST_BEAT_TIMEOUT": "3",
    }
    found = RecoveryEnvironment.from_env(variables)
    assert found == RecoveryEnvironment("host", 1, Worker(0, 1, 0), 7.0, 3.0)
