"""Rendezvous of the ranks of one start, in a store of its own.

torchrun's ranks share the store of its agent over all restarts, so a restarted rank finds the
addresses of dead ones there. The restart count is no remedy: it stays where the membership changes.
So the ranks of one start agree on a name that nobody had before. The agents stop all old ranks
before they start new ones, therefore what is left is stale, but nobody who wrote it writes again:

- rank 0 draws the name of the attempt;
- every other rank draws a nonce, queues it, and waits for the answer of that name;
- rank 0 answers all, also the dead, and is done when every rank has confirmed the new name.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.constants import default_pg_timeout

from lightning_dist.elastic.recovery.generations import init_alone
from lightning_dist.elastic.recovery.member import RecoveryEnvironment, await_answer
from lightning_dist.ranks.launch import Launch
from lightning_dist.settings.run import RecoveryMode, RecoverySettings

ROOT = "lightning_dist/attempts"
POLL_SECONDS = (0.002, 0.1)
"""First and longest pause between two looks: the store's own waits cannot be interrupted."""
_LAST_SECONDS = 5.0
"""Time after the deadline for a store that answers: then the error names the ranks."""


class StoreQueue:
    """The queue of a store.

    Stores of torch 2.7 have none: there, each text has a key with a number. Writers that were
    killed leave numbers without a text, so a reader looks at all of them.

    Args:
        numbered: use keys with numbers; None: if the store has no queues.
    """

    def __init__(self, store: Store, *, numbered: bool | None = None) -> None:
        self._store = store
        self._numbered = not hasattr(store, "queue_push") if numbered is None else numbered
        self._taken: set[int] = set()

    def push(self, text: str) -> None:
        """Put ``text`` at the end."""
        if not self._numbered:
            self._store.queue_push("queue", text)
            return
        number = self._store.add("pushed", 1)
        self._store.set(f"text {number}", text)

    def pop(self) -> str | None:
        """Take the first text that is there; None: there is none."""
        if not self._numbered:
            is_empty = self._store.queue_len("queue") == 0
            return None if is_empty else self._store.queue_pop("queue").decode()
        for number in range(1, self._store.add("pushed", 0) + 1):
            if number not in self._taken and self._store.check([f"text {number}"]):
                self._taken.add(number)
                text: str = self._store.get(f"text {number}").decode()
                self._store.delete_key(f"text {number}")
                return text
        return None


def attempt_store(launch: Launch, *, timeout: timedelta) -> Store:
    """The store at ``MASTER_ADDR`` under a prefix that only the ranks of this start know.

    All ranks call it. Works with every rendezvous backend of torchrun.

    Args:
        timeout: for the ranks to meet here, and then of every operation on the store.

    Raises:
        TimeoutError: on rank 0, naming the ranks that did not come; on others, if rank 0 did not;
            on all, if the store does not answer.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    def looks() -> Iterator[Store]:
        # As torch's env:// rendezvous makes it, except that the host does not wait for the others
        # here, where it could not say who is missing.
        store = TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=launch.rank == 0 and not launch.shares_store,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        yield rendezvous(store, rank=launch.rank, world_size=launch.world_size, deadline=deadline)

    limit = timeout.total_seconds() + _LAST_SECONDS
    store = f"The ranks' store at {launch.master_addr}:{launch.master_port}"
    return await_answer(looks(), limit=limit, store=store)


def rendezvous(store: Store, *, rank: int, world_size: int, deadline: float) -> Store:
    """``store`` under the prefix on which the ``world_size`` callers agree.

    Args:
        deadline: of ``time.monotonic()``, in seconds.

    Raises:
        TimeoutError: as :func:`attempt_store`.
    """
    rendezvous_store = PrefixStore(ROOT, store)
    if rank == 0:
        attempt = secrets.token_hex(8)
        _gather(rendezvous_store, attempt, set(range(1, world_size)), deadline)
        _forget_others(rendezvous_store, attempt)
    else:
        attempt = _join(rendezvous_store, rank, deadline)
    return PrefixStore(f"{ROOT}/{attempt}", store)


def _gather(rendezvous_store: Store, attempt: str, missing: set[int], deadline: float) -> None:
    """Tell every rank of ``missing`` the name ``attempt``."""
    others, queue, requests = len(missing), StoreQueue(rendezvous_store), list[str]()

    def comes() -> bool:
        if (text := queue.pop()) is not None:
            requests.append(text)
        return text is not None

    while missing:
        if not _wait(comes, deadline):
            raise TimeoutError(
                f"{len(missing)} of {others} other ranks did not reach rank 0 in time: "
                f"{', '.join(map(str, sorted(missing)))}; see the output of these ranks, and "
                "whether they can connect to MASTER_ADDR and MASTER_PORT"
            )
        rank, nonce, *confirmed = requests.pop().split()
        if not confirmed:
            rendezvous_store.set(f"answer-{nonce}", attempt)
        elif confirmed == [attempt]:
            missing.discard(int(rank))


def _join(rendezvous_store: Store, rank: int, deadline: float) -> str:
    """The name that rank 0 has drawn."""
    nonce = secrets.token_hex(8)
    answer = f"answer-{nonce}"
    queue = StoreQueue(rendezvous_store)
    queue.push(f"{rank} {nonce}")
    if not _wait(lambda: rendezvous_store.check([answer]), deadline):
        raise TimeoutError(
            f"Rank {rank} had no answer from rank 0 in time; see the output of rank 0, and whether "
            "all ranks have the same MASTER_ADDR and MASTER_PORT"
        )
    attempt: str = rendezvous_store.get(answer).decode()
    rendezvous_store.delete_key(answer)
    queue.push(f"{rank} {nonce} {attempt}")
    return attempt


def _wait(ready: Callable[[], bool], deadline: float) -> bool:
    """Whether ``ready`` came true before ``deadline``. Signal handlers run meanwhile."""
    pause, longest = POLL_SECONDS
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True


def _forget_others(rendezvous_store: Store, attempt: str) -> None:
    """Remove what earlier attempts left, so that a store does not grow with every restart.

    Answers that are still there were for the dead: the living removed theirs before they confirmed.
    """
    if not hasattr(
        rendezvous_store, "list_keys"
    ):  # in torch 2.7, with some keys more for each start
        return
    with suppress(RuntimeError):  # not every store can list its keys
        for key in rendezvous_store.list_keys():
            if not key.startswith(f"{attempt}/"):
                rendezvous_store.delete_key(key)


def init_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    recovery: RecoveryMode = "restart",
) -> None:
    """``torch.distributed.init_process_group`` with a separate store for each start.

    Under torchrun all restarts share a store, in which restarted ranks may read addresses of
    terminated ones. Use this function in a loop of your own, and call it before ``Accelerator()``,
    which uses an existing group. The strategies of this package call it themselves. Without
    torchrun it is the same as torch's function.

    Args:
        backend: as in torch; None: torch's choice.
        timeout: limit for the rendezvous and for every collective; None: torch's default.
        recovery: as in ElasticLoop. ``"in_process"``, under ``lightning-dist launch``: a group of
            this process alone, which others join when ElasticLoop starts.

    Raises:
        TimeoutError: ranks did not join in time; rank 0 names them.
    """
    RecoverySettings(recovery=recovery)  # checks it
    environment = RecoveryEnvironment.from_env() if recovery == "in_process" else None
    if environment is not None:
        init_alone(environment, backend=backend, timeout=timeout)
        return
    launch = Launch.from_env()
    if not launch.is_elastic:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = attempt_store(launch, timeout=timeout or default_pg_timeout)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
