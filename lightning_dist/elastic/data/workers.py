"""Workers of data loaders, which a launcher's signal reaches as well as their process."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any


class EndsAtSecondSignal:
    """A ``worker_init_fn``: a signal from elsewhere is left to the process that has the worker.

    A launcher sends its signal to the whole process group. A worker that ends at it takes the
    training down before there is a checkpoint. At one from its own process it ends, and at the
    second from anywhere. Workers of a fork server end with that, which no signal spares; others
    start with the signals blocked, see `StartsBlocked`.

    Programs that a worker starts inherit that the signals are blocked (a process learns who has
    sent one only while they are): ``Popen.kill()`` ends them, and ``terminate()`` has no effect.

    Args:
        usual: what the user wants a worker to begin with.
        signals: that are sent to groups.
    """

    def __init__(
        self, usual: Callable[[int], None] | None, signals: Sequence[signal.Signals]
    ) -> None:
        self.usual = usual
        self._signals = tuple(signals)
        self._process = os.getpid()

    def __call__(self, worker: int) -> None:
        if hasattr(signal, "sigwaitinfo"):
            # The sender of a signal is known to sigwaitinfo, not to handlers.
            signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
            threading.Thread(target=self._listen, daemon=True).start()
        if self.usual is not None:
            self.usual(worker)

    def _listen(self) -> None:
        own, forwarded = {self._process, os.getppid()}, set[int]()
        while True:
            came = signal.sigwaitinfo(self._signals)
            if came.si_pid in own:
                os._exit(0)
            if came.si_signo in forwarded:
                os._exit(128 + came.si_signo)
            forwarded.add(came.si_signo)


class StartsBlocked:
    """The ``Process`` of a multiprocessing context: with signals blocked from its start on.

    A worker that has not come to its ``worker_init_fn`` yet would end at a signal of the launcher,
    or, where its process handles the signal, miss the only one with which that ends it, and be
    waited for.

    Args:
        usual: the context's class of processes.
        signals: that are blocked.
    """

    def __init__(self, usual: type[Any], signals: Sequence[signal.Signals]) -> None:
        self._usual = usual
        self._signals = tuple(signals)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        process = self._usual(*args, **kwargs)

        def start() -> None:
            del process.start  # a process that is not a fork is pickled
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        process.start = start
        return process


def keep_workers(loader: Any, signals: Sequence[signal.Signals]) -> None:
    """Let the workers of ``loader`` outlive the first of ``signals``, if it has workers."""
    usual = getattr(loader, "worker_init_fn", None)
    if getattr(loader, "num_workers", 0) > 0 and not isinstance(usual, EndsAtSecondSignal):
        _keep_garbage_from_forks()
        loader.worker_init_fn = EndsAtSecondSignal(usual, signals)
        context: Any = loader.multiprocessing_context or multiprocessing.get_context()
        if hasattr(signal, "sigwaitinfo") and context.get_start_method() != "forkserver":
            context = copy.copy(context)
            context.Process = StartsBlocked(context.Process, signals)
            loader.multiprocessing_context = context


@cache
def _keep_garbage_from_forks() -> None:
    """Let a fork collect nothing that its parent has left in circles of references.

    A gloo group among it, of an earlier training, waits in its destructor for threads that only the
    parent has: the worker crashes, or hangs.
    """
    os.register_at_fork(after_in_child=gc.freeze)
