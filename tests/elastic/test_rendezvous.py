"""What a rank knows of its launcher, and how the ranks of one start find each other."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch.distributed as dist
from processes import port
from store_hosts import StoreHost

from lightning_dist.elastic import rendezvous
from lightning_dist.elastic.rendezvous import StoreQueue, attempt_store
from lightning_dist.ranks.launch import Launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "4711",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "4",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}


def test_what_torchrun_set() -> None:
    assert Launch.from_env(TORCHRUN) == Launch(
        is_elastic=True,
        rank=5,
        world_size=6,
        local_rank=1,
        local_world_size=2,
        node_rank=2,
        nodes=3,
        max_restarts=4,
        run_id="job",
        master_addr="node7",
        master_port=4711,
        shares_store=False,
    )
    assert Launch.from_env(TORCHRUN).missing_settings() == []


def test_a_process_of_its_own() -> None:
    launch = Launch.from_env({"RANK": ""})
    assert launch == Launch(is_elastic=False)
    assert launch.missing_settings() == []


def test_a_number_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"WORLD_SIZE must be an integer, got 'many'"):
        Launch.from_env({**TORCHRUN, "WORLD_SIZE": "many"})


def test_without_restarts() -> None:
    (message,) = Launch.from_env({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0"}).missing_settings()
    assert "--max-restarts" in message


@pytest.mark.parametrize(
    ("nodes", "run_id", "told"),
    [
        ("3", "job", True),
        ("1", "job", True),  # --nnodes=1:3, and the others have not come yet
        ("1", "0c5a4ab2-7a4e-4f2b-9a54-8f2c4d2a9b10", False),  # --standalone draws such an id
    ],
)
def test_a_shared_store_where_nodes_may_join(nodes: str, run_id: str, told: bool) -> None:
    shared = {
        **TORCHRUN,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": nodes,
        "TORCHELASTIC_RUN_ID": run_id,
    }
    messages = Launch.from_env(shared).missing_settings()
    assert [m for m in messages if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in m] == messages
    assert bool(messages) == told


LIMIT = 20.0
T = TypeVar("T")


@pytest.fixture
def agent() -> dist.TCPStore:
    """The store of an agent, which outlives its ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launch(agent: dist.TCPStore, rank: int, world_size: int) -> Launch:
    return Launch(
        is_elastic=True,
        rank=rank,
        world_size=world_size,
        master_port=agent.port,
        shares_store=True,
    )


def each(ranks: Sequence[int], call: Callable[[int], T]) -> list[T]:
    """What ``call(rank)`` returns on every rank, one thread each."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks, timeout=60))


def start(agent: dist.TCPStore, world_size: int) -> list[dist.Store]:
    def rank(number: int) -> dist.Store:
        timeout = timedelta(seconds=LIMIT)
        return attempt_store(launch(agent, number, world_size), timeout=timeout)

    return each(range(world_size), rank)


def client(agent: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", agent.port, is_master=False, timeout=timedelta(seconds=LIMIT))


def require_one_store(stores: Sequence[dist.Store]) -> None:
    """What any rank writes all others read."""
    for rank, store in enumerate(stores):
        store.set(f"from-{rank}", str(rank))
    for store in stores:
        found = [store.get(f"from-{rank}") for rank in range(len(stores))]
        assert found == [str(rank).encode() for rank in range(len(stores))]


def test_all_ranks_meet_at_every_attempt(agent: dist.TCPStore) -> None:
    for world_size in (4, 2, 1, 3, 16):
        require_one_store(start(agent, world_size))


def test_ranks_that_died_while_they_waited(agent: dist.TCPStore) -> None:
    """Rank 0 never came, and what its ranks asked is still in the store at the next start."""
    for rank in (1, 2):
        with pytest.raises(TimeoutError, match=f"Rank {rank} had no answer from rank 0"):
            rendezvous.rendezvous(client(agent), rank=rank, world_size=3, deadline=time.monotonic())
    require_one_store(start(agent, 3))


def test_a_rank_zero_that_died_while_it_gathered(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 took its answer, rank 2 never came; both start again, with another name."""
    has_met, deadline = threading.Event(), time.monotonic() + 60
    clock = SimpleNamespace(
        monotonic=lambda: deadline + 1 if has_met.is_set() else time.monotonic(), sleep=time.sleep
    )
    monkeypatch.setattr("lightning_dist.elastic.rendezvous.time", clock)

    def first(rank: int) -> dist.Store | TimeoutError:
        try:
            return rendezvous.rendezvous(client(agent), rank=rank, world_size=3, deadline=deadline)
        except TimeoutError as error:
            return error
        finally:
            has_met.set()

    error, old = each((0, 1), first)
    monkeypatch.undo()
    assert isinstance(error, TimeoutError)
    assert str(error).startswith("1 of 2 other ranks did not reach rank 0 in time: 2;")
    assert isinstance(old, dist.PrefixStore)
    old.set("address", "of the dead")
    stores = start(agent, 3)
    assert not any(store.check(["address"]) for store in stores)


def test_a_confirmation_of_an_earlier_attempt_counts_for_nothing(agent: dist.TCPStore) -> None:
    rendezvous_store = dist.PrefixStore("lightning_dist/attempts", client(agent))
    StoreQueue(rendezvous_store).push("1 0123456789abcdef fedcba9876543210")
    with pytest.raises(TimeoutError, match="reach rank 0 in time: 1;"):
        rendezvous.rendezvous(client(agent), rank=0, world_size=2, deadline=time.monotonic() + 0.3)


@pytest.mark.skipif(not hasattr(dist.Store, "list_keys"), reason="torch lists no keys")
def test_a_store_does_not_grow_with_its_attempts(agent: dist.TCPStore) -> None:
    sizes = []
    for _ in range(4):
        stores = start(agent, 3)
        for rank, store in enumerate(stores):
            dist.PrefixStore("group", store).set(f"address-{rank}", "x")
        with pytest.raises(TimeoutError):  # somebody dies on the way to the next
            rendezvous.rendezvous(client(agent), rank=1, world_size=3, deadline=time.monotonic())
        sizes.append(client(agent).num_keys())
    assert sizes[1:] == sizes[:1] * 3


def test_where_rank_zero_has_the_store() -> None:
    """With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 no agent has one at that address."""
    free = port()

    def rank(number: int) -> dist.Store:
        own = Launch(is_elastic=True, rank=number, world_size=2, master_port=free)
        return attempt_store(own, timeout=timedelta(seconds=LIMIT))

    require_one_store(each((0, 1), rank))


def test_rank_zero_names_who_is_missing_where_it_has_the_store() -> None:
    own = Launch(is_elastic=True, rank=0, world_size=3, master_port=port())
    with pytest.raises(TimeoutError, match="2 of 2 other ranks did not reach rank 0 in time: 1, 2"):
        # Its own connection may take a second, where an answer of DNS is lost (conftest.py).
        attempt_store(own, timeout=timedelta(seconds=3))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stops", ["before the connection", "while ranks meet"])
def test_a_store_that_stops_is_an_error_in_time(
    stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for its answer without a bound, whatever the timeout."""
    monkeypatch.setattr(rendezvous, "_LAST_SECONDS", 0.0)
    join = rendezvous._join
    with StoreHost() as host:
        own = Launch(
            is_elastic=True, rank=1, world_size=2, master_port=host.port, shares_store=True
        )
        if stops == "before the connection":
            host.stop()
        else:
            monkeypatch.setattr(rendezvous, "_join", lambda *given: (host.stop(), join(*given))[1])
        said = rf"store at 127\.0\.0\.1:{host.port} does not answer: it must answer within 0\.3 s"
        with pytest.raises(TimeoutError, match=said):
            attempt_store(own, timeout=timedelta(seconds=0.3))
