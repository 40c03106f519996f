"""The dataloader of a loop, dealt to however many ranks there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_dist.elastic.layout import Layout, layout_for
from lightning_dist.elastic.loading import NotExactError, facts_of, shard
from lightning_dist.elastic.plan import EpochPlan, Position
from lightning_dist.elastic.sampling import Cursor
from lightning_dist.elastic.state import ElasticState, require_same_data
from lightning_dist.elastic.workers import end_workers, keep_workers
from lightning_dist.integrations.loop.settings import LoopSettings


class Dealt:
    """This rank's share of every epoch.

    Args:
        loader: the user's, for one process.
        settings: of the loop.
        resumed: what a checkpoint said; None for a fresh start.
        path: of that checkpoint.
        begun: the layout of a start that left no checkpoint; its global batch is kept too, if the
            script still asks for the same batches.
        seed: of the order.

    Raises:
        ValueError: the samples of the loader cannot be dealt, or are not those of the checkpoint.
    """

    def __init__(
        self,
        loader: Any,
        settings: LoopSettings,
        *,
        rank: int,
        world_size: int,
        resumed: ElasticState | None,
        path: str,
        begun: Layout | None,
        seed: int,
    ) -> None:
        self._facts = facts_of(_unprepared(loader), seed=seed)
        self._rank = rank
        if resumed is not None:
            require_same_data(resumed, size=self._facts.size, path=path)
        script = Layout.of_script(
            world_size=world_size,
            micro_batch=self._facts.batch_size,
            accumulate=settings.accumulate,
        )
        self.first = _first(script, resumed=resumed, begun=begun)
        """The layout that the run began with."""
        self.layout = layout_for(settings.batch_policy, self.first, script=script)
        """The layout of now."""
        self._cursor = Cursor()
        if resumed is not None:
            self._cursor.begin = resumed.position
        self.batches = shard(loader, self.plan, cursor=self._cursor, seed=seed)
        """A loader of this rank's batches, from where the epoch begins or goes on."""
        keep_workers(self.batches, settings.signals)

    @property
    def size(self) -> int:
        """Samples of an epoch, as the dataset has them."""
        return self._facts.size

    @property
    def begin(self) -> Position:
        """Where the present epoch begins."""
        return self._cursor.begin

    def set_epoch(self, epoch: int) -> None:
        """Go to ``epoch``; a resumed one is not begun again."""
        self._cursor.set_epoch(epoch)

    def close(self) -> None:
        """No more batches are wanted."""
        end_workers(self.batches)

    def plan(self) -> EpochPlan:
        """The passes of the present epoch on this rank."""
        facts, begin = self._facts, self._cursor.begin
        return EpochPlan(self.layout, self._rank, begin, facts.size, drop_last=facts.drop_last)


def _first(script: Layout, *, resumed: ElasticState | None, begun: Layout | None) -> Layout:
    if resumed is not None:
        return resumed.first
    if begun is None:
        return script
    same = replace(begun, world_size=0, global_batch=0) == replace(
        script, world_size=0, global_batch=0
    )
    return begun if same else script


def _unprepared(loader: Any) -> Any:
    kind = type(loader)
    if kind.__module__.partition(".")[0] in ("accelerate", "lightning", "lightning_fabric"):
        raise NotExactError(
            f"a {kind.__name__} deals its batches to ranks itself; give ElasticLoop the DataLoader "
            "as it is before prepare() or setup_dataloaders(), and device="
        )
    return loader
