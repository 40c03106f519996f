"""A worker in one generation after the other: its groups, and what all ranks decide together."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs
from store_hosts import StoreHost
from torch.distributed import HashStore, TCPStore
from torch.distributed.distributed_c10d import _world
from worlds import Rank, run_threads

from lightning_dist.base.features import RECOVERY
from lightning_dist.elastic.recovery import generations as generations_module
from lightning_dist.elastic.recovery import member as member_module
from lightning_dist.elastic.recovery.connections import Connections, listening_ports
from lightning_dist.elastic.recovery.generations import GenerationGroups, Generations, init_alone
from lightning_dist.elastic.recovery.member import Member, RecoveryEnvironment, StoreLostError
from lightning_dist.elastic.recovery.protocol import Generation, Worker, WorkerReport
from lightning_dist.ranks.agreement import Ranks, StopConsensus
from lightning_dist.ranks.failures import CollectiveError

LIMIT = timedelta(seconds=30)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)


@pytest.fixture
def environment(server: TCPStore) -> RecoveryEnvironment:
    return RecoveryEnvironment("127.0.0.1", server.port, Worker(0, 0, 0))


@pytest.fixture
def generations(
    environment: RecoveryEnvironment, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Generations]:
    """Of a worker whose peers are lost before it meets them."""

    def lose(groups: GenerationGroups, generation: Generation) -> None:
        raise CollectiveError("a member was lost")

    monkeypatch.setattr(generations_module, "init_alone", lambda *arguments, **named: None)
    monkeypatch.setattr(GenerationGroups, "__init__", lambda *arguments: None)
    monkeypatch.setattr(GenerationGroups, "enter", lose)
    found = Generations(environment)
    yield found
    found.member._stop()


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
) -> Iterator[tuple[Member, StoreHost]]:
    """A member, and the process that hosts its store, in which nobody makes generations."""
    with StoreHost() as host:
        environment = RecoveryEnvironment(
            "127.0.0.1", host.port, Worker(0, 0, 0), beat_timeout=beat_timeout
        )
        member = Member(environment, on_broken=lambda: None)  # connected, however busy the machine
        member._environment = replace(environment, report_timeout=report_timeout)
        yield member, host
    member._stop()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("asks", ["finds_others", "announce", "report", "gather", "connect"])
def test_a_stopped_store_is_lost_within_the_report_timeout(asks: str) -> None:
    """torch waits for it without a bound, whatever the timeout of the client."""
    with member_of_another_process(0.3) as (member, host):
        host.stop()
        arguments = {
            "announce": [{}],
            "report": [WorkerReport(member.name)],
            "gather": ["key", "value", [member.name]],
        }.get(asks, [])
        asked = member._environment if asks == "connect" else member
        with pytest.raises(StoreLostError, match=r"within 0\.3 s.*LIGHTNING_DIST_REPORT_TIMEOUT"):
            getattr(asked, asks)(*arguments)


@pytest.mark.timeout(60)
def test_a_leader_may_write_as_long_as_its_beats_arrive() -> None:
    """After that it is evicted, and the next one writes."""
    with member_of_another_process(5.0, beat_timeout=1.5) as (member, host):
        member.generation = Generation(0, members=(member.name, "0.1.0"), leader=member.name)
        sent = member._answered
        while member._answered == sent:
            os.sched_yield()
        assert not member.lapsed()
        host.stop()
        while not (why := member.lapsed()):
            os.sched_yield()
        assert why == "the launcher's store has not answered the leader for 3 s"
        member.generation = Generation(1, members=(member.name, "0.1.0"), leader="0.1.0")
        assert not member.lapsed()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("used", "lapsed"), [(1.5, False), (0.2, True)])
def test_a_leader_that_was_busy_on_a_busy_machine_may_write(used: float, lapsed: bool) -> None:
    """For 9 s no other thread has run; it has had a sixth of a processor, or was stopped."""
    with member_of_another_process(5.0, beat_timeout=3.0) as (member, host):
        member.generation = Generation(0, members=(member.name, "0.1.0"), leader=member.name)
        host.stop()
        now, busy = time.monotonic(), time.process_time()
        member._answered, member._looked = now - 9.0, (now - 9.0, busy - used)
        assert bool(member.lapsed()) == lapsed


@pytest.mark.timeout(60)
def test_a_report_that_no_generation_follows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers, and the launcher's coordinator does not."""
    monkeypatch.setattr(member_module, "_PATIENCE", 0.1)
    with (
        member_of_another_process(0.2) as (member, _),
        pytest.raises(StoreLostError, match=r"next generation within 0\.3 s.*got none"),
    ):
        member.report(WorkerReport(member.name))


def test_timeouts_are_those_of_the_launcher() -> None:
    variables = {
        "LIGHTNING_DIST_RECOVERY_STORE": "host:1",
        "LIGHTNING_DIST_WORKER": "0.1.0",
        "LIGHTNING_DIST_REPORT_TIMEOUT": "7",
        "LIGHTNING_DIST_BEAT_TIMEOUT": "3",
    }
    found = RecoveryEnvironment.from_env(variables)
    assert found == RecoveryEnvironment("host", 1, Worker(0, 1, 0), 7.0, 3.0)


@pytest.fixture
def groups(environment: RecoveryEnvironment) -> Iterator[GenerationGroups]:
    """Of the only worker, as it begins."""
    if dist.is_initialized():  # of another test in this process
        dist.destroy_process_group()
    init_alone(environment)
    yield GenerationGroups(environment, lambda key, value, names: [value], Connections())
    dist.destroy_process_group()


def alone(number: int) -> Generation:
    return Generation(number, members=("0.0.0",))


@needs(RECOVERY)
def test_groups_are_the_same_objects_in_each_generation(groups: GenerationGroups) -> None:
    found = []
    for number in range(3):
        groups.enter(alone(number))
        of_model = groups.new(backend=groups.backend)
        found.append([dist.group.WORLD, of_model, groups.new(), groups.new([0])])
        assert all(each.size() == 1 for each in found[-1])  # type: ignore[union-attr]
        assert dist.get_rank(of_model) == dist.get_rank() == 0
        assert len({*map(id, found[-1])}) == 4
    assert found[0] == found[1] == found[2]


@needs(RECOVERY)
def test_groups_of_a_user_have_the_number_that_they_have_on_newcomers(
    groups: GenerationGroups,
) -> None:
    """However many this process has made before."""
    numbers = []
    for number, earlier in enumerate((0, 3)):
        groups.enter(alone(number))
        numbers.append(_world.group_count)
        for _ in range(earlier + 1):
            dist.new_group([0])
    groups.enter(alone(2))
    assert [*numbers, _world.group_count] == [4096, 2 * 4096, 3 * 4096]


def test_connections_of_other_threads_stay_open() -> None:
    """They may be opened while groups are connected, which listen on ports that are known."""
    listens, elsewhere = socket.create_server(("", 0)), socket.create_server(("", 0))
    connections = Connections()
    with listens, elsewhere:
        assert {*listening_ports()} >= {listens.getsockname()[1], elsewhere.getsockname()[1]}
        earlier = pair_of(listens)
        with connections.opened([listens.getsockname()[1]]):
            other, own = pair_of(elsewhere), pair_of(listens)
            connections.shut()  # also while there may be more
            assert own[1].recv(1) == b""
            last = pair_of(listens)
        connections.shut()
        assert last[1].recv(1) == b""
        for near, far in (other, earlier):
            near.sendall(b"x")
            assert far.recv(1) == b"x"
    for each in (*earlier, *other, *own, *last):
        each.close()


def pair_of(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
    return near, server.accept()[0]


@needs(RECOVERY)
def test_lines_of_a_traceback_have_no_rank_before_there_are_others(
    environment: RecoveryEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    if dist.is_initialized():
        dist.destroy_process_group()
    init_alone(environment)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert capsys.readouterr().err == "ValueError: x\n"
    dist.destroy_process_group()


@needs(RECOVERY)
def test_wrapped_process_groups_are_refused(environment: RecoveryEnvironment) -> None:
    """Else all but the first would wait for others."""
    before = dist.get_debug_level()  # type: ignore[attr-defined]
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    try:
        with pytest.raises(ValueError, match=r"TORCH_DISTRIBUTED_DEBUG=DETAIL wraps"):
            init_alone(environment)
    finally:
        dist.set_debug_level(before)  # type: ignore[attr-defined]


@needs(RECOVERY)
def test_a_process_group_of_another_kind_is_refused(environment: RecoveryEnvironment) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"create it with lightning_dist.init_process_group\("):
        GenerationGroups(environment, lambda key, value, names: [value], Connections())
    dist.destroy_process_group()


def votes(wishes: list[list[bool]]) -> list[list[bool]]:
    """What every rank hears when rank r casts ``wishes[r]``, one after the other."""

    def one(rank: Rank) -> list[bool]:
        vote = StopConsensus(rank.group("votes"), ranks=Ranks(None))
        heard = [vote.ask(wish) for wish in wishes[rank.rank]]
        return [*heard, vote.ask(False)]

    return run_threads(one, len(wishes))


@settings(max_examples=8)
@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.tuples(*[st.booleans()] * n), max_size=5)))
def test_all_hear_at_once_what_any_wished_one_call_before(calls: list[tuple[bool, ...]]) -> None:
    size = len(calls[0]) if calls else 2
    heard = votes([[call[rank] for call in calls] for rank in range(size)])
    assert heard == [[False, *map(any, calls)]] * size


def test_a_rank_alone_has_nobody_to_wait_for() -> None:
    vote = StopConsensus(None, ranks=Ranks(None))
    wishes = [True, False, True, True, False]
    assert [vote.ask(wish) for wish in wishes] == wishes
    assert Ranks(None).gather("x") == ["x"]


def test_a_cast_does_not_wait_for_the_others() -> None:
    early = threading.Event()

    def one(rank: Rank) -> bool:
        vote = StopConsensus(rank.group("votes"), ranks=Ranks(None))
        if rank.rank == 1:
            assert early.wait(20)
        vote.ask(rank.rank == 1)
        early.set()
        return vote.ask(False)

    assert run_threads(one, 2) == [True, True]


def test_other_questions_may_come_between_two_calls() -> None:
    def one(rank: Rank) -> list[object]:
        ranks = Ranks(rank.group("facts"))
        stop = StopConsensus(rank.group("stop"), ranks=ranks)
        stop.ask(rank.rank == 0)
        return [ranks.gather({"rank": rank.rank, "more": "x" * rank.rank}), stop.ask(False)]

    gathered = [{"rank": rank, "more": "x" * rank} for rank in range(3)]
    assert run_threads(one, 3) == [[gathered, True]] * 3


def test_waits_end_where_they_are_given_up() -> None:
    """Of facts and of the wish to stop: the other rank does not come."""

    def one(rank: Rank) -> None:
        ranks = Ranks(rank.group("facts"))
        stop = StopConsensus(rank.group("stop"), ranks=ranks)
        if rank.rank == 1:
            assert given_up.wait(60)
            return
        stop.ask(False)
        timer = threading.Timer(0.2, ranks.give_up)
        timer.start()
        with pytest.raises(RuntimeError, match="Gave up waiting for"):
            ranks.all({})
        with pytest.raises(RuntimeError, match="Gave up waiting for"):
            ranks.gather("x")
        with pytest.raises(RuntimeError, match="Gave up waiting for the wish to stop"):
            stop.ask(False)
        given_up.set()

    given_up = threading.Event()
    run_threads(one, 2)
