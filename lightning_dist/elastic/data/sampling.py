"""Samples of a rank: which ones, in which order, and the workers that load them."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dist.elastic.data.plan import EpochPlan, Position
from lightning_dist.elastic.rng import derive_seed, isolated


class EpochOrder:
    """Order of a sampler of a single process, fixed by seed and epoch.

    Args:
        sampler: of the user's loader. A ``DistributedSampler`` stands for its whole dataset,
            shuffled or not.
        seed: the same on all ranks and after every restart. A generator that the sampler has is
            seeded with it too: some samplers seed their own at random when they are made.
    """

    def __init__(self, sampler: Sampler[Any] | Iterable[Any], *, seed: int) -> None:
        self._sampler: Iterable[Any] = _of_one_process(sampler)
        sampler_seed = sampler.seed if isinstance(sampler, DistributedSampler) else 0
        self._seed = derive_seed(seed, "sampler", sampler_seed)
        generator = getattr(self._sampler, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._cached: tuple[int, Sequence[Any]] | None = None

    @property
    def size(self) -> int:
        """Samples of an epoch.

        Raises:
            ValueError: the sampler does not know.
        """
        try:
            return len(self._sampler)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                "A sampler must know the number of samples of an epoch, and "
                f"{type(self._sampler)!r} has no len(); give it a __len__"
            ) from None

    def of(self, epoch: int) -> Sequence[Any]:
        """Indices in the dataset, in order."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._make(epoch))
        return self._cached[1]

    def _make(self, epoch: int) -> Sequence[Any]:
        if type(self._sampler) is SequentialSampler:
            return range(len(self._sampler))
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with isolated(derive_seed(self._seed, "order", epoch)), self._own_generator(epoch):
            drawn = iter(self._sampler)
            try:
                order: Sequence[Any] = array("q", drawn)
            except TypeError:  # not all samplers yield integers
                order = list(self._sampler)
        if len(order) != self.size:
            raise ValueError(
                f"A sampler must yield as many samples as its len(), {self.size}; "
                f"{type(self._sampler).__name__} gave {len(order)} in epoch {epoch}"
            )
        return order

    @contextmanager
    def _own_generator(self, epoch: int) -> Iterator[None]:
        """Seed the sampler's own generator, which the next EpochOrder must find as it was."""
        if self._generator is None:
            yield
            return
        before = self._generator.get_state()
        self._generator.manual_seed(derive_seed(self._seed, "own", epoch))
        try:
            yield
        finally:
            self._generator.set_state(before)


def _of_one_process(sampler: Sampler[Any] | Iterable[Any]) -> Iterable[Any]:
    if not isinstance(sampler, DistributedSampler):
        return sampler
    if type(sampler) is not DistributedSampler:
        raise ValueError(
            f"{type(sampler).__name__} shards samples itself; elastic restart does that, for any "
            "number of ranks: give the loader a sampler for a single process"
        )
    dataset: Any = sampler.dataset
    return RandomSampler(dataset) if sampler.shuffle else SequentialSampler(dataset)


class Cursor:
    """Start of the current epoch: its first sample, or the sample where it is resumed."""

    def __init__(self) -> None:
        self.begin = Position()
        self._on_epoch: Callable[[int], None] = lambda epoch: None

    def follow(self, on_epoch: Callable[[int], None]) -> None:
        """Call ``on_epoch`` with the present epoch, and whenever it is another one."""
        self._on_epoch = on_epoch
        on_epoch(self.begin.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to ``epoch``; a resumed one is not begun again."""
        if epoch != self.begin.epoch:
            self.go_to(Position(epoch))

    def go_to(self, begin: Position) -> None:
        """Go on at ``begin``."""
        self.begin = begin
        self._on_epoch(begin.epoch)


class EpochSetter(DistributedSampler[Any]):
    """Takes ``set_epoch`` for a loader, whose batch sampler does the rest.

    Trainers leave alone what has a DistributedSampler, and tell it the epoch.
    """

    def __init__(self, dataset: Any, cursor: Cursor, *, world_size: int, rank: int) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank)
        self._cursor = cursor

    def set_epoch(self, epoch: int) -> None:
        """Go to ``epoch``."""
        super().set_epoch(epoch)
        self._cursor.set_epoch(epoch)


class ElasticBatchSampler(Sampler[list[Any]]):
    """The batches of one rank: lists of indices, of unequal lengths where the ranks do not fit.

    A micro-batch to which a rank has nothing to give gets one sample, whose loss has weight zero.

    Args:
        order: of an epoch.
        plan: the micro-batches of the present epoch.
        on_first: called before the first batch of an iteration is drawn.
    """

    def __init__(
        self,
        order: EpochOrder,
        plan: Callable[[], EpochPlan],
        *,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._order = order
        self._plan = plan
        self._on_first = on_first

    def __len__(self) -> int:
        """Passes of the whole epoch, also of a resumed one."""
        return len(self._plan())

    def __iter__(self) -> Iterator[list[Any]]:
        self._on_first()
        plan = self._plan()
        epoch, index = plan.begin.epoch, plan.first_micro_batch
        order = self._order.of(epoch)
        # Asked at every step: what is not drawn yet may be resharded.
        while index < len(plan) and plan.begin.epoch == epoch:
            positions = plan.micro_batch_at(index).samples
            yield [order[position] for position in positions or [plan.begin.samples]]
            before, plan = plan, self._plan()
            index = index + 1 if plan == before else plan.first_micro_batch


class EndsAtSecondSignal:
    """A ``worker_init_fn``: a signal from elsewhere is left to the process that has the worker.

    A launcher sends its signal to the whole process group. A worker that ends at it takes the
    training down before there is a checkpoint. At one from its own process it ends, and at the
    second from anywhere. Workers of a fork server end with that, which no signal spares; others
    start with the signals blocked, see `_starts_blocked`.

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
        training, forwarded = {self._process, os.getppid()}, set[int]()
        while True:
            notice = signal.sigwaitinfo(self._signals)
            if notice.si_pid in training:
                os._exit(0)
            if notice.si_signo in forwarded:
                os._exit(128 + notice.si_signo)
            forwarded.add(notice.si_signo)


def _starts_blocked(
    usual: Callable[..., Any], signals: Sequence[signal.Signals], /, *args: Any, **kwargs: Any
) -> Any:
    """A process of the class ``usual`` that has ``signals`` blocked from its start on.

    A worker that has not come to its ``worker_init_fn`` yet would end at a signal of the launcher,
    or, where its process handles the signal, miss the only one with which that ends it, and be
    waited for.
    """
    process = usual(*args, **kwargs)

    def start() -> None:
        del process.start  # a process that is not a fork is pickled
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
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
            context.Process = partial(_starts_blocked, context.Process, tuple(signals))
            loader.multiprocessing_context = context


@cache
def _keep_garbage_from_forks() -> None:
    """Let a fork collect nothing that its parent has left in circles of references.

    A gloo group among it, of an earlier training, waits in its destructor for threads that only the
    parent has: the worker crashes, or hangs.
    """
    os.register_at_fork(after_in_child=gc.freeze)
