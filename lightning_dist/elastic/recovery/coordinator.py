"""Coordinator of the generations, and the node where it runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    PrefixStore,
    Store,
    TCPStore,
)

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.recovery.protocol import (
    ROOT,
    Generation,
    Keys,
    Worker,
    WorkerReport,
    decode_generation,
    decode_report,
    encode,
    next_generation,
)
from lightning_dist.ranks.launch import RECOVERY_STORE

log = get_logger(__name__)


QUIET_SECONDS, BUSY_SECONDS, CHECK_SECONDS = 0.02, 0.005, 0.25
"""Pauses between two looks: while all train, while a generation ends, and at every beat."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """Limits of recovery within the process; the launcher reads them from its environment.

    Attributes:
        min_workers: with fewer all end, and are restarted from a checkpoint.
        max_workers: more are left waiting.
        beat_timeout: seconds without a sign of life after which a worker is dead: a heartbeat, or
            CPU time that it uses.
        report_timeout: seconds after which one that is busy without a heartbeat is dead. And those
            that members have to come after the first, when a generation ends; the longest time
            that a worker computes between two collectives, such as a validation of its own. Who
            hangs there ends itself (``hang_timeout``).
    """

    min_workers: int = 1
    max_workers: int = 1
    beat_timeout: float = 5.0
    report_timeout: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"recovery needs 1 <= minimum workers <= maximum workers, got {self.min_workers} "
                f"and {self.max_workers}: see LIGHTNING_DIST_MIN_WORKERS and --nnodes"
            )
        if min(self.beat_timeout, self.report_timeout) <= 0:
            raise ValueError(
                f"Timeouts of recovery must be above 0 s, got {self.beat_timeout:g} s without a "
                f"heartbeat and {self.report_timeout:g} s without a report"
            )

    @classmethod
    def from_env(
        cls, *, nodes: tuple[int, int], ranks: int, environ: Mapping[str, str] = os.environ
    ) -> CoordinatorSettings:
        """Settings for fewest and most nodes with so many workers each.

        At least there is one worker for each of the fewest nodes, unless the user says otherwise.

        Raises:
            ValueError: a variable is not a number, or out of range.
        """

        def number(name: str, default: float) -> float:
            text = environ.get(f"LIGHTNING_DIST_{name}", "")
            try:
                return float(text or default)
            except ValueError:
                raise ValueError(f"LIGHTNING_DIST_{name} must be a number, got {text!r}") from None

        return cls(
            min_workers=int(number("MIN_WORKERS", nodes[0])),
            max_workers=nodes[1] * ranks,
            beat_timeout=number("BEAT_TIMEOUT", cls.beat_timeout),
            report_timeout=number("REPORT_TIMEOUT", cls.report_timeout),
        )


class Coordinator:
    """Makes generations of one start, from what workers and agents write into a store.

    Args:
        store: under :data:`~lightning_dist.elastic.recovery.protocol.ROOT`; used by one thread.
        places: workers of the start, for all of which the first generation waits.
    """

    def __init__(self, store: Store, settings: CoordinatorSettings, *, places: int) -> None:
        self.newest = Generation(-1)
        self.is_over = False
        """All members have ended with 0."""
        self.ended = ""
        """Reason why it makes no more generations; empty while it does."""
        self._store = store
        self._settings = settings
        self._places = places
        self._names: list[str] = []
        self._ready: dict[str, WorkerReport] = {}
        self._waiting = 0  # newcomers for whom there was a place; counted here only
        self._had: set[str] = set()  # members of any generation
        self._dead: dict[str, str] = {}
        self._done: dict[str, str] = {}
        self._beats: dict[str, tuple[bytes, float]] = {}
        self._ticks: dict[str, tuple[bytes, float]] = {}  # CPU time
        self._polled = self._checked = float("-inf")
        self._ends = False  # whether this generation does
        self._reported: float | None = None  # since when a member of it has

    def poll(self, now: float) -> float:
        """Look at the store, and make a generation where one is due.

        Args:
            now: seconds on a clock that does not go back.

        Returns:
            Seconds until the next look.
        """
        # While this process did not run either, silence says nothing about workers.
        pause = max(0.0, now - self._polled - 1.0) if self._beats else 0.0
        self._beats = {name: (beat, at + pause) for name, (beat, at) in self._beats.items()}
        self._polled = now
        for index in range(len(self._names), self._store.add(Keys.workers, 0)):
            self._names.append(self._store.get(Keys.worker(index)).decode())
        if now - self._checked >= CHECK_SECONDS:
            self._checked = now
            self._check_workers(now)
        self._read_newcomers()
        if self.newest.members and not self._is_ending():
            return QUIET_SECONDS
        reports = self._reports()
        late: list[str] = []
        fewest = self._settings.min_workers
        if reports and self._reported is None:
            self._reported = now
        if now - (self._reported or now) > self._settings.report_timeout:
            late = [name for name in self.newest.members if name not in reports]
        generation = next_generation(
            self.newest,
            reports,
            ready=self._ready,
            dead={**self._done, **self._dead},
            late=late,
            min_workers=max(fewest, 0 if self.newest.members else self._places),
            max_workers=self._settings.max_workers,
        )
        if generation is not None:
            self._publish(replace(generation, waiting=self._waiting))
        return BUSY_SECONDS if self._ends else QUIET_SECONDS

    def run(self, stop: threading.Event) -> None:
        """Look again and again until ``stop``, the end of recovery or of the store.

        The body of a thread; :attr:`ended` says why it has come to its end by itself.
        """
        pause = 0.0
        try:
            while not stop.wait(pause):
                pause = self.poll(time.monotonic())
                if self.newest.ends:
                    self.ended = self.newest.ends
                    return
        except Exception as error:  # whatever it is, nobody else would make generations
            self.ended = f"{type(error).__name__} in the coordinator: {error}"
            log.warning("recovery: %s", self.ended)
            try:
                self._publish(Generation(self.newest.number + 1, ends=self.ended))
            except Exception:
                log.warning("recovery: the store is unavailable; workers cannot be notified")

    def _check_workers(self, now: float) -> None:
        """Note workers that are dead or have ended, and those that send no beats any more."""
        for name in self._names:
            if name in self._dead or name in self._done:
                continue
            if self._store.check([Keys.dead(name)]):
                self._dead[name] = self._store.get(Keys.dead(name)).decode()
            elif self._store.check([Keys.done(name)]):
                self._done[name] = "has ended"
            elif self._store.check([Keys.beat(name)]):
                beat = self._store.get(Keys.beat(name))
                last, since = self._beats.get(name, (b"", now))
                if beat != last:
                    self._beats[name] = (beat, now)
                elif now - max(since, self._busy_until(name, now)) > self._settings.beat_timeout:
                    self._declare_dead(name, f"no heartbeat for {now - since:.1f} s")
                elif now - since > self._settings.report_timeout:
                    self._declare_dead(name, f"no heartbeat for {now - since:.1f} s, but busy")
        members = self.newest.members
        if members and not self.is_over and all(name in self._done for name in members):
            self.is_over = True
            self._store.set(Keys.over, "1")

    def _busy_until(self, name: str, now: float) -> float:
        """When a worker was last seen to use the CPU; it may hold the interpreter's lock."""
        ticks = self._store.get(Keys.cpu(name)) if self._store.check([Keys.cpu(name)]) else b""
        last, since = self._ticks.get(name, (b"", float("-inf")))
        if ticks != last:
            self._ticks[name], since = (ticks, now), now
        return since

    def _declare_dead(self, name: str, reason: str) -> None:
        """Note that a worker is dead: its agent kills it, if it lives."""
        self._dead[name] = reason
        self._store.set(Keys.dead(name), reason)

    def _read_newcomers(self) -> None:
        known = {*self._ready, *self._dead, *self._done, *self._had}
        for name in self._names:
            key = Keys.report(-1, name)
            if name not in known and self._store.check([key]):
                self._ready[name] = decode_report(self._store.get(key))
                if len(self.newest.members) < self._settings.max_workers:
                    self._waiting = self._store.add(Keys.waiting, 1)

    def _is_ending(self) -> bool:
        """True once a member has failed, is dead, or pauses."""
        if not self._ends:
            number, members = self.newest.number, self.newest.members
            broken = Keys.broken(number)
            # If one pauses for newcomers all do.
            if self._store.check([broken]) or any(name in self._dead for name in members):
                if not self._store.check([broken]):
                    reasons = [
                        f"worker {name}: {self._dead[name]}"
                        for name in members
                        if name in self._dead
                    ]
                    self._store.set(broken, "; ".join(reasons))
            elif not self._store.check([Keys.report(number, members[0])]):
                return False
            self._ends = True
        self._checked = float("-inf")  # from now on at every look
        return True

    def _reports(self) -> dict[str, WorkerReport]:
        number, reports = self.newest.number, {}
        for name in self.newest.members:
            key = Keys.report(number, name)
            if name not in self._dead and self._store.check([key]):
                reports[name] = decode_report(self._store.get(key))
        return reports

    def _publish(self, generation: Generation) -> None:
        left_out = [
            name
            for name in self.newest.members
            if name not in generation.members and not generation.ends
        ]
        self._store.set(Keys.generation(generation.number), encode(generation))
        self._store.set(Keys.newest, str(generation.number))
        for name in left_out:
            if name not in self._dead and name not in self._done:
                self._declare_dead(
                    name, f"excluded from generation {generation.number}: it did not report"
                )
        self.newest = generation
        self._had.update(generation.members)
        for name in (*generation.members, *generation.refused):
            self._ready.pop(name, None)
            self._had.add(name)
        self._ends, self._reported, self._checked = False, None, float("-inf")
        log.info("recovery: %s", describe(generation))


def describe(generation: Generation) -> str:
    """``generation`` in one line, for people."""
    if generation.ends:
        return f"all workers stop, to restart from a checkpoint: {generation.ends}"
    why = f" ({generation.reason})" if generation.reason else ""
    refused = f"; refused: {', '.join(generation.refused)}" if generation.refused else ""
    members = f"{len(generation.members)} workers at step {generation.step}"
    return f"generation {generation.number}: {members}{why}{refused}"


_TIMEOUT = timedelta(seconds=60)


class RecoveryHost:
    """The store of one start, and the thread that makes its generations.

    A start has a store of its own, so that nobody who is left of an earlier one is heard.

    Args:
        host: name or address by which workers and other launchers reach this machine.
        nodes: launchers of the start.
        places: their workers.
    """

    def __init__(
        self, host: str, settings: CoordinatorSettings, *, nodes: int, places: int
    ) -> None:
        self._server = TCPStore(host, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        self.address = f"{host}:{self._server.port}"
        PrefixStore(ROOT, self._server).add(Keys.nodes, nodes)
        self._coordinator = Coordinator(connect(self.address), settings, places=places)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._coordinator.run,
            args=(self._stop,),
            name="recovery coordinator",
            daemon=True,
        )
        self._thread.start()

    @property
    def ended(self) -> str:
        """Reason why no more generations are made; empty while they are."""
        return self._coordinator.ended

    def close(self) -> None:
        """End the coordinator and the store."""
        self._stop.set()
        self._thread.join()
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
        """Workers that were started last, by local rank."""
        self._store = connect(address, timeout)
        self._ranks, self._min_workers = ranks, min_workers
        self._newest = Generation(-1)
        self.refused: set[str] = set()
        """Workers that no generation wants."""

    def join(self, node: int | None = None) -> int:
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
            for missed in range(self._newest.number + 1, number + 1):
                self._newest = decode_generation(self._store.get(Keys.generation(missed)))
                self.refused.update(self._newest.refused)
        return self._newest

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

    def report_cpu(self, local_rank: int) -> None:
        """Tell how much CPU time a worker has used, once it has told its process."""
        name = str(self.workers[local_rank])
        if not self._store.check([Keys.process(name)]):
            return
        process = self._store.get(Keys.process(name)).decode()
        with suppress(OSError), open(f"/proc/{process}/stat") as file:
            # Behind the name, which may be anything, times in user and kernel mode are 11 and 12.
            fields = file.read().rpartition(")")[2].split()
            self._store.set(Keys.cpu(name), str(int(fields[11]) + int(fields[12])))

    def leave(self) -> None:
        """This launcher does not need the store any more."""
        self._store.add(Keys.left, 1)

    def all_have_left(self) -> bool:
        """Whether no launcher needs the store."""
        return bool(self._store.add(Keys.left, 0) >= self._store.add(Keys.nodes, 0))
