"""The order of an epoch's samples, the same for every world size, and one rank's share of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
        own = sampler.seed if isinstance(sampler, DistributedSampler) else 0
        self._seed = derive_seed(seed, "sampler", own)
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
        # Asked at every step: what is not drawn yet may be dealt anew.
        while index < len(plan) and plan.begin.epoch == epoch:
            positions = plan.micro_batch_at(index).samples
            yield [order[position] for position in positions or [plan.begin.samples]]
            before, plan = plan, self._plan()
            index = index + 1 if plan == before else plan.first_micro_batch
