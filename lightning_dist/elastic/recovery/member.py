"""A worker in the launcher's store: it beats, hears that its generation is broken, and reports."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    PrefixStore,
    Store,
    TCPStore,
)

from lightning_dist.elastic.recovery.coordinator import CoordinatorSettings
from lightning_dist.elastic.recovery.protocol import (
    NOT_YET,
    ROOT,
    Generation,
    Keys,
    Worker,
    WorkerReport,
    decode_generation,
    encode,
)
from lightning_dist.ranks.failures import CollectiveError
from lightning_dist.ranks.launch import RECOVERY_STORE

_T = TypeVar("_T")

_STORE = "the launcher's store"
"""Name of the store in errors."""

BEAT_SECONDS = 0.5
_QUIET, _BUSY = 0.02, 0.003
"""Seconds between two looks at the store. (A wait for a key that times out writes a warning.)"""

_PATIENCE = 120.0
"""Seconds that a member waits for the others of its generation."""

_CONNECT = 30.0
"""Seconds in which the store must accept a connection."""

_STARVED = 1.0
"""Seconds between two looks of a thread after which others have kept it from running."""
_SHARE = 0.1
"""Fraction of a processor that a running process uses at least, however busy the machine is."""
_LEASE = 30.0
"""Seconds beyond the timeout of beats in which a leader without an answer ends: less than the next
one waits for the checkpoint folder."""

_REPORTED = 1 << 40
"""Progress of a member that has come to the end of its generation."""


@dataclass(frozen=True)
class RecoveryEnvironment:
    """Environment that the agent sets for a worker that can recover within its process.

    Attributes:
        host: of the launcher's store.
        port: of the same.
        worker: who this process is.
        report_timeout: as in RecoverySettings; also of every answer of the store.
        beat_timeout: as in RecoverySettings.
    """

    host: str
    port: int
    worker: Worker
    report_timeout: float = CoordinatorSettings.report_timeout
    beat_timeout: float = CoordinatorSettings.beat_timeout

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> RecoveryEnvironment | None:
        """Read the variables; None where the launcher does not recover within the process."""
        store = environ.get(RECOVERY_STORE, "")
        if not store:
            return None
        host, _, port = store.rpartition(":")
        worker = Worker.parse(environ["LIGHTNING_DIST_WORKER"])
        report = environ.get("LIGHTNING_DIST_REPORT_TIMEOUT") or cls.report_timeout
        beat = environ.get("LIGHTNING_DIST_BEAT_TIMEOUT") or cls.beat_timeout
        return cls(host, int(port), worker, float(report), float(beat))

    def connect(self) -> Store:
        """A client of the store of its own: one that waits blocks all others who use it.

        Raises:
            StoreLostError: the store is gone, or does not answer.
        """
        timeout = timedelta(seconds=_CONNECT)

        def looks() -> Iterator[Store]:
            yield TCPStore(
                self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout
            )

        with _one_error():
            return PrefixStore(ROOT, await_answer(looks(), limit=self.report_timeout, store=_STORE))


class StoreLostError(RuntimeError):
    """The launcher's store does not answer: nobody knows who takes part."""


def await_answer(
    looks: Iterable[_T | None],
    *,
    limit: float,
    store: str,
    started: Callable[[threading.Thread], None] = lambda thread: None,
    is_over: Callable[[], bool] = lambda: False,
) -> _T:
    """The first of ``looks`` at a store that is not None, each within ``limit`` seconds.

    In a thread: whoever asks a store that is stopped, or connects to it, is blocked, whatever its
    timeout.

    Args:
        store: its name in the error.
        started: called with that thread.
        is_over: nobody waits for an answer any more.

    Raises:
        TimeoutError: a look took longer.
    """
    answers: SimpleQueue[_T | Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            for answer in looks:
                answers.put(answer)
                if answer is not None or is_over():
                    return
        except Exception as error:  # it is raised where the answer is waited for
            answers.put(error)

    thread = threading.Thread(target=ask, name="look at the store", daemon=True)
    started(thread)
    thread.start()
    while True:
        try:
            answer = answers.get(timeout=limit)
        except Empty:
            raise TimeoutError(
                f"{store} does not answer: it must answer within {limit:g} s; see whether its "
                "launcher is stopped or cut off"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer


class Member:
    """This worker, from the time when it is ready to train to the end of the process.

    Args:
        environment: of the worker.
        on_broken: called from a thread as soon as it is known that this generation cannot go on,
            and again until this worker is in the next one: its groups may still be made.
    """

    def __init__(
        self,
        environment: RecoveryEnvironment,
        *,
        on_broken: Callable[[], None],
    ) -> None:
        self._environment = environment
        self.name = str(environment.worker)
        self.generation = Generation(NOT_YET)
        self.store = environment.connect()
        """Client for process groups and reports; used by one thread at a time."""
        self.store.set(Keys.process(self.name), str(os.getpid()))
        self._watched = environment.connect()
        self._on_broken = on_broken
        self.progress: Callable[[], int] = lambda: 0
        """Number of times that this worker has come to where it waits for others, in this
        generation."""
        self._has_reported = False
        self._reason = ""  # why this generation is broken, as far as is known here
        self._waiting = 0  # newcomers so far
        self._lock = threading.Lock()
        self._answered = time.monotonic()  # when the last beat that has arrived was sent
        self._looked: tuple[float, float] | None = None  # whether it has lapsed
        self._is_over = False
        self._thread = threading.Thread(target=self._watch, name="recovery member", daemon=True)
        self._asking = self._thread  # the last that has asked the store for something
        self._thread.start()
        atexit.register(self._stop)  # a thread in torch would abort a process that ends

    @property
    def is_broken(self) -> bool:
        """Whether this generation is known to be at its end."""
        return bool(self._reason)

    def learns_of_loss(self, seconds: float) -> bool:
        """Whether this generation is known to be at its end within so many seconds."""
        end = time.monotonic() + seconds
        while not self.is_broken and time.monotonic() < end:
            time.sleep(_BUSY)
        return self.is_broken

    @property
    def waiting(self) -> int:
        """Newcomers that the next generation admits, so that all should pause."""
        return max(0, self._waiting - self.generation.waiting)

    def finds_others(self) -> bool:
        """Whether there is a generation already, so that this worker joins others.

        Raises:
            StoreLostError: the store is gone.
        """

        def looks() -> Iterator[bool]:
            yield bool(self.store.check([Keys.newest]))

        return self._ask(looks())

    def announce(self, facts: Mapping[str, str]) -> Generation:
        """Say that this worker is ready to train; the first generation that has it.

        Raises:
            StoreLostError: the store is gone.
        """

        def looks() -> Iterator[Generation | None]:
            self.store.set(
                Keys.report(NOT_YET, self.name),
                encode(WorkerReport(self.name, facts=facts)),
            )
            newest = -1
            while True:  # a spare waits as long as all places are taken
                last = self._newest(newest)
                for number in range(newest + 1, last + 1):
                    generation = self._read(number)
                    if self.name in (*generation.members, *generation.refused) or generation.ends:
                        yield generation
                newest = max(newest, last)
                yield None

        return self._enter(self._ask(looks()))

    def report(self, report: WorkerReport) -> Generation:
        """Write ``report``, which ends this generation here; the next one.

        Raises:
            StoreLostError: the store is gone, or there is no next one in time.
        """
        number = self.generation.number
        limit = self._environment.report_timeout + _PATIENCE

        def looks() -> Iterator[Generation | None]:
            end = time.monotonic() + limit
            self.store.set(Keys.report(number, self.name), encode(report))
            self._has_reported = True
            if report.failed:
                self.store.set(Keys.broken(number), report.reason or "?")
            # The coordinator knows how long others may take, and tells if there is none.
            while (newest := self._newest(number)) <= number:
                if time.monotonic() > end:
                    raise StoreLostError(
                        f"the launcher must form the next generation within {limit:g} s of a "
                        f"report, got none after generation {number}; see its output, and set "
                        "LIGHTNING_DIST_REPORT_TIMEOUT higher if ranks compute for so long alone"
                    )
                yield None
            yield self._read(newest)

        return self._enter(self._ask(looks()))

    def gather(self, key: str, value: str, names: Sequence[str]) -> list[str]:
        """Values that workers with these names, this one among them, have for ``key``.

        Raises:
            StoreLostError: the store is gone.
            CollectiveError: they do not come, or the generation is broken.
        """
        keys = [f"{key}/{name}" for name in names]

        def looks() -> Iterator[list[str] | None]:
            end = time.monotonic() + _PATIENCE
            self.store.set(f"{key}/{self.name}", value)
            while not (are_here := self.store.check(keys)) and not self.is_broken:
                if time.monotonic() > end:
                    break
                yield None
                time.sleep(_BUSY)
            yield [each.decode() for each in self.store.multi_get(keys)] if are_here else []

        if values := self._ask(looks()):
            return values
        why = self._reason or f"they did not come within {_PATIENCE:g} s"
        raise CollectiveError(f"a member was lost before all had come: {why}")

    def waits_for_another(self) -> bool:
        """Whether another member has not come as far as this one. From any thread."""
        here, others = self._where, [name for name in self.generation.members if name != self.name]

        def looks() -> Iterator[bool]:
            store = self._environment.connect()
            beats = [
                store.get(Keys.beat(name)).decode()
                for name in others
                if store.check([Keys.beat(name)])
            ]
            yield any(_where_of(beat) < here for beat in beats)

        with suppress(RuntimeError):  # of the store; the others are notified
            return self._ask(looks(), limit=_CONNECT)
        return False

    def lapsed(self) -> str:
        """Reason why this worker may not write any more; empty if it may. From any thread.

        A leader whose beats do not arrive is evicted, and the next one waits until it has ended.
        """
        now, busy = time.monotonic(), time.process_time()
        (before, was_busy), self._looked = self._looked or (now, busy), (now, busy)
        gap, used = now - before, busy - was_busy
        if gap > _STARVED:  # some other thread has held the interpreter's lock meanwhile
            self._answered = min(now, self._answered + (gap if used > gap * _SHARE else used))
        limit = self._environment.beat_timeout
        limit += min(limit, _LEASE)
        if self.generation.leader != self.name or time.monotonic() - self._answered <= limit:
            return ""
        return f"the launcher's store has not answered the leader for {limit:g} s"

    @property
    def _where(self) -> tuple[int, int]:
        progress = _REPORTED if self._has_reported else self.progress()
        return self.generation.number, progress

    def abort(self, reason: str) -> None:
        """Let all members of this generation know that it cannot go on. Returns at once."""
        self._note(self.generation.number, reason or "an exchange has failed")

    def _ask(self, looks: Iterable[_T | None], *, limit: float | None = None) -> _T:
        """The first of ``looks`` at the store that is not None, each within ``limit`` seconds."""

        def started(thread: threading.Thread) -> None:
            self._asking = thread

        limit = self._environment.report_timeout if limit is None else limit
        with _one_error():
            return await_answer(
                looks,
                limit=limit,
                store=_STORE,
                started=started,
                is_over=lambda: self._is_over,
            )

    def _newest(self, before: int) -> int:
        """The number of the newest generation, once it is greater than ``before``, or soon."""
        time.sleep(_BUSY)
        if not self.store.check([Keys.newest]):
            return before
        return max(before, int(self.store.get(Keys.newest)))

    def _read(self, number: int) -> Generation:
        return decode_generation(self.store.get(Keys.generation(number)))

    def _enter(self, generation: Generation) -> Generation:
        with self._lock:
            self.generation, self._reason, self._has_reported = generation, "", False
        return generation

    def _stop(self) -> None:
        self._is_over = True
        for thread in (self._thread, self._asking):
            thread.join(2.0)

    def _watch(self) -> None:
        beats, next_beat = 0, 0.0
        while not self._is_over:
            number = self.generation.number
            try:
                if time.monotonic() >= next_beat:
                    beats, next_beat = beats + 1, time.monotonic() + BEAT_SECONDS
                    at = ".".join(map(str, self._where))
                    sent = time.monotonic()
                    self._watched.set(Keys.beat(self.name), f"{beats} {at}")
                    self._waiting = self._watched.add(Keys.waiting, 0)
                    self._answered = sent  # a set alone waits for no answer
                self._watch_generation(number)
            except Exception as error:
                self.abort(f"the launcher's store is unavailable: {error}")
                return

    def _watch_generation(self, number: int) -> None:
        key = Keys.broken(number)
        if self._reason and number == self.generation.number:
            with self._lock:
                if number == self.generation.number:
                    self._on_broken()
            if not self._watched.check([key]):
                self._watched.set(key, self._reason)
            time.sleep(_BUSY)
            return
        if self._watched.check([key]):
            self._note(number, self._watched.get(key).decode() or "?")
        else:
            time.sleep(_QUIET)

    def _note(self, number: int, reason: str) -> None:
        with self._lock:
            if number == self.generation.number and not self._reason:
                self._reason = reason
                self._on_broken()


def _where_of(beat: str) -> tuple[int, int]:
    """Generation and progress in it, of a worker that beats so."""
    generation, _, progress = beat.partition(" ")[2].partition(".")
    return int(generation), int(progress)


@contextmanager
def _one_error() -> Iterator[None]:
    """Turn what the store raises, and a wait that is too long, into one error."""
    try:
        yield
    except StoreLostError:
        raise
    except RuntimeError as error:
        raise StoreLostError(f"{_STORE} does not answer: {error}") from error
    except TimeoutError as error:
        raise StoreLostError(f"{error}, or set LIGHTNING_DIST_REPORT_TIMEOUT higher") from error
