"""Iterable datasets that declare how they are dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info

from lightning_dist.elastic.data.plan import EpochPlan


@runtime_checkable
class Shardable(Protocol):
    """Interface of an iterable dataset with which no restart repeats or skips a sample.

    Example::

        class Lines(IterableDataset):
            def __len__(self):
                return 1_000_000

            def __iter__(self):
                return self.iter_shard(epoch=0, start=0, step=1)

            def iter_shard(self, *, epoch, start, step):
                return itertools.islice(open(f"epoch-{epoch}.txt"), start, None, step)
    """

    def __len__(self) -> int:
        """Samples of an epoch, exactly."""
        ...

    def iter_shard(self, *, epoch: int, start: int, step: int) -> Iterator[Any]:
        """Samples ``start``, ``start + step``, ... of an order that only ``epoch`` may change."""
        ...


class ShardedStream(IterableDataset[list[Any]]):
    """Lists of samples, one for every micro-batch of one rank, also in the workers of a loader.

    Args:
        dataset: read by every worker, which keeps its part.
        plan: the micro-batches of the present epoch.
        on_first: called before the first sample is read in the trainer's own process.
    """

    def __init__(
        self,
        dataset: Shardable,
        plan: Callable[[], EpochPlan],
        *,
        on_first: Callable[[], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self._plan = plan
        self._on_first = on_first

    def __len__(self) -> int:
        """Passes of the whole epoch."""
        return len(self._plan())

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is started afresh: the plan, not the trainer that is asked for it."""
        return {**self.__dict__, "_plan": partial(_given, self._plan()), "_on_first": None}

    def __iter__(self) -> Iterator[list[Any]]:
        worker, plan = get_worker_info(), self._plan()
        own, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is None and self._on_first is not None:
            self._on_first()
        start = plan.layout.share(plan.rank, begin=plan.begin.samples, count=1).start
        drawn = self.dataset.iter_shard(
            epoch=plan.begin.epoch, start=start, step=plan.layout.world_size
        )
        spare: list[Any] | None = None
        for number, index in enumerate(range(plan.first_micro_batch, len(plan))):
            samples = [_next(drawn, self.dataset) for _ in plan.micro_batch_at(index).samples]
            if not samples and spare is None:
                spare = [
                    next(iter(self.dataset.iter_shard(epoch=plan.begin.epoch, start=0, step=1)))
                ]
            if number % workers == own:
                yield samples or list(spare or [])


def _given(plan: EpochPlan) -> EpochPlan:
    return plan


def _next(drawn: Iterator[Any], dataset: Shardable) -> Any:
    try:
        return next(drawn)
    except StopIteration:
        raise ValueError(
            f"An epoch of {type(dataset).__name__} has {len(dataset)} samples by its len(), but "
            "iter_shard ended before that; make len() exact"
        ) from None
