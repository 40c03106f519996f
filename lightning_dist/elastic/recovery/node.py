"""The workers of one launcher, and the store and coordinator that one of the launchers has."""

from __future__ import annotations

import json
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    PrefixStore,
    TCPStore,
)

from lightning_dist.elastic.recovery.coordinator import (
    Coordinator,
    CoordinatorThread,
    RecoverySettings,
)
from lightning_dist.elastic.recovery.protocol import (
    ROOT,
    Generation,
    Keys,
    Worker,
    decode_generation,
)
from lightning_dist.ranks.launch import RECOVERY_STORE

_TIMEOUT = timedelta(seconds=60)


class RecoveryHost:
    """The store of one start, and the thread that makes its generations.

    A start has a store of its own, so that nobody who is left of an earlier one is heard.

    Args:
        host: name or address by which workers and other launchers reach this machine.
        nodes: launchers of the start.
        places: their workers.
    """

    def __init__(self, host: str, settings: RecoverySettings, *, nodes: int, places: int) -> None:
        self._server = TCPStore(host, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        self.address = f"{host}:{self._server.port}"
        PrefixStore(ROOT, self._server).add(Keys.nodes, nodes)
        self._thread = CoordinatorThread(
            Coordinator(connect(self.address), settings, places=places)
        )
        self._thread.start()

    @property
    def ended(self) -> str:
        """Reason why no more generations are made; empty while they are."""
        return self._thread.ended

    def close(self) -> None:
        """End the coordinator and the store."""
        self._thread.close()
        del self._server


def connect(address: str, timeout: timedelta = _TIMEOUT) -> PrefixStore:
    """The store at ``address``, as all of recovery use it.

    Raises:
        RuntimeError: nobody has answered in time.
    """
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timeout)
    store.set_timeout(_TIMEOUT)
    return PrefixStore(ROOT, store)


class RecoveryNode:
    """Exchange of one launcher with the coordinator about its workers.

    Args:
        address: of the store.
        min_workers: passed to the workers.
    """

    def __init__(
        self, address: str, *, ranks: int, min_workers: int, timeout: timedelta = _TIMEOUT
    ) -> None:
        self.address = address
        self.workers: list[Worker] = []
        """By local rank, those that were started last."""
        self._store = connect(address, timeout)
        self._ranks, self._min_workers = ranks, min_workers
        self._newest = Generation(-1)
        self.refused: set[str] = set()
        """Workers that no generation wants."""

    def come(self, node: int | None = None) -> int:
        """Take part as ``node``; None: as one that nobody was before. Returns which."""
        if node is None:
            node = self._store.add(Keys.nodes, 1) - 1
        self.workers = [Worker(node, rank, -1) for rank in range(self._ranks)]
        return node

    def start(self, local_rank: int) -> dict[str, str]:
        """Variables of the next process in a place; it has a name of its own from now on."""
        last = self.workers[local_rank]
        worker = self.workers[local_rank] = last._replace(incarnation=last.incarnation + 1)
        index = self._store.add(Keys.workers, 1) - 1
        self._store.set(Keys.worker(index), str(worker))
        return {
            RECOVERY_STORE: self.address,
            "LIGHTNING_DIST_WORKER": str(worker),
            "LIGHTNING_DIST_MIN_WORKERS": str(self._min_workers),
        }

    def newest(self) -> Generation:
        """The newest generation; its number is -1 before the first."""
        if self._store.check([Keys.newest]):
            number = int(self._store.get(Keys.newest))
            for each in range(self._newest.number + 1, number + 1):
                self._newest = decode_generation(self._store.get(Keys.generation(each)))
                self.refused.update(self._newest.refused)
        return self._newest

    def modules(self) -> list[str]:
        """Modules that the first workers have imported; none where no worker has written them."""
        if not self._store.check([Keys.modules]):
            return []
        found: list[str] = json.loads(self._store.get(Keys.modules))
        return found

    def is_over(self) -> bool:
        """Whether all workers of the newest generation, on all nodes, have ended with 0."""
        return bool(self._store.check([Keys.over]))

    def death_of(self, worker: Worker) -> str:
        """Reason why the coordinator declared ``worker`` dead; empty if it did not."""
        key = Keys.dead(str(worker))
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def report_end(self, worker: Worker, reason: str) -> None:
        """A process has ended; with 0 if ``reason`` is empty."""
        if not reason:
            self._store.set(Keys.done(str(worker)), "1")
            return
        self._store.set(Keys.dead(str(worker)), reason)
        notified = None
        # The coordinator looks for the dead when it has made a generation, so it is enough that
        # the one that is the newest after this is notified.
        while (newest := self.newest()) != notified and str(worker) in newest.members:
            self._store.set(Keys.broken(newest.number), f"worker {worker}: {reason}")
            notified = newest

    def leave(self) -> None:
        """This launcher does not need the store any more."""
        self._store.add(Keys.left, 1)

    def all_have_left(self) -> bool:
        """Whether no launcher needs the store."""
        return bool(self._store.add(Keys.left, 0) >= self._store.add(Keys.nodes, 0))
