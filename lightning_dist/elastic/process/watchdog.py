"""Ends a process that hangs, so that its launcher can start it again."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from lightning_dist.base.log import get_logger, prefixed
from lightning_dist.ranks.launch import Launch

if TYPE_CHECKING:
    import psutil

log = get_logger(__name__)

EXIT_STUCK = 76
"""Exit code of a process that ended itself because it hung, or its grace period was over."""

_PERIOD = 0.1
_PATIENCE = 5.0
"""Seconds for a word before the end."""


class Watchdog:
    """A thread with two deadlines: of the next sign of progress, and of the end.

    Args:
        hang_timeout: seconds without a :meth:`heartbeat` after which the process ends; None: never.
        last_words: called before that with the reason.
        waits: whether this process only waits for one that has not come as far, which is the one
            that hangs; asked when there was no progress for so long.
        lapsed: reason why this process may not go on; empty if it may.
        orphaned: called once, when the launcher of this process has terminated.
        end: how the process ends.
        clock: in seconds.
    """

    def __init__(
        self,
        hang_timeout: float | None,
        *,
        last_words: Callable[[str], None] = lambda reason: None,
        waits: Callable[[], bool] = lambda: False,
        lapsed: Callable[[], str] = lambda: "",
        orphaned: Callable[[], None] = lambda: None,
        end: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_timeout = hang_timeout
        self._last_words, self._waits, self._lapsed = last_words, waits, lapsed
        self._orphaned = orphaned
        self._siblings = siblings = Siblings() if Launch.from_env().is_elastic else None
        self._end = end or (lambda why: _end(why, siblings))
        self._stopped = threading.Event()
        self._clock = clock
        self._progress_by = self._end_by = math.inf
        self._why_end = ""

    def start(self) -> None:
        """Begin to watch; :meth:`heartbeat` has to be called from now on."""
        self.heartbeat()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def heartbeat(self) -> None:
        """There is progress."""
        if self._hang_timeout is not None:
            self._progress_by = self._clock() + self._hang_timeout

    def rest(self) -> None:
        """No progress is to be expected; the end still is, if it was set."""
        self._progress_by = math.inf

    def end_within(self, seconds: float, why: str) -> None:
        """The process has to be gone by then, whatever it does; the first such bound counts."""
        if not self._why_end:
            self._why_end, self._end_by = why, self._clock() + seconds

    def _watch(self) -> None:
        siblings = self._siblings
        while not self._stopped.wait(_PERIOD):
            if siblings is not None and siblings.are_orphans:
                siblings = None
                self._orphaned()
            now = self._clock()
            why = self._why_end if now >= self._end_by else self._lapsed()
            if not why and now >= self._progress_by:
                if self._waits():
                    self.heartbeat()
                    continue
                why = f"no progress for {self._hang_timeout:g} s"
            if why:
                _attempt(self._last_words, why)
                self._end(why)
                return


class Siblings:
    """The ranks that the launcher of this process has started beside it.

    The launcher is remembered now: a process whose launcher has died gets another parent, whose
    other children are strangers. They are known where psutil is installed.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._launcher: psutil.Process | None = None
        try:
            import psutil
        except ImportError:
            log.warning(
                "psutil is not installed (pip install psutil): a rank that is stopped delays a "
                "restart by the 30 s that torchrun waits for it"
            )
            return
        process = psutil.Process()
        self._launcher = process.parent()  # psutil compares start times, so no later process is it
        self._job = _job_of(process)

    @property
    def are_orphans(self) -> bool:
        """True if their launcher has terminated."""
        return os.getppid() != self._parent

    def kill_stopped(self) -> None:
        """Kill those that are stopped.

        A launcher that ends its ranks waits (torchrun: 30 s) for one that cannot hear its signal.
        """
        if self._launcher is None:
            return
        import psutil

        with suppress(psutil.Error, OSError):
            for rank in self._launcher.children():
                with suppress(psutil.Error, OSError):
                    if rank.status() == psutil.STATUS_STOPPED and _job_of(rank) == self._job:
                        rank.kill()


def _job_of(process: psutil.Process) -> str:
    """The job of torch's elastic agent that ``process`` was started for.

    A fork does not show its own environment, and its parent may have forks of several jobs: those
    of one process group are taken for one job.
    """
    job: str | None = process.environ().get("TORCHELASTIC_RUN_ID")
    return job or f"process group {os.getpgid(process.pid)}"


def _end(why: str, siblings: Siblings | None) -> NoReturn:
    """Say where every thread is, and be gone: no handler and no destructor may hang now."""
    if siblings is not None:
        siblings.kill_stopped()
    _attempt(_say, why)
    os._exit(EXIT_STUCK)


def _say(why: str) -> None:
    print(prefixed(f"watchdog: {why}, exiting ({EXIT_STUCK})"), file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


def _attempt(call: Callable[[str], None], why: str) -> None:
    """Call it, but neither its failure nor a disk or a pipe that hangs keeps the process."""
    thread = threading.Thread(target=call, args=(why,), daemon=True)
    thread.start()
    thread.join(_PATIENCE)
