"""Samplers that yield this rank's share of an epoch, from wherever training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dist.elastic.order import EpochOrder
from lightning_dist.elastic.plan import EpochPlan, Position


class Cursor:
    """Where the present epoch begins: at its first sample, or where it is resumed."""

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
            self.begin = Position(epoch)
            self._on_epoch(epoch)


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

    A pass to which a rank has nothing to give gets one sample, whose loss has weight zero.

    Args:
        order: of an epoch.
        plan: the passes of the present epoch.
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
        order = self._order.of(plan.begin.epoch)
        for index in range(plan.first_pass, len(plan)):
            positions = plan.pass_at(index).samples
            yield [order[position] for position in positions or [plan.begin.samples]]
