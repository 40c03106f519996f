"""The train dataloader of a fit, dealt to however many ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dist.elastic.layout import BatchPolicy, Layout, layout_for
from lightning_dist.elastic.loading import LoaderFacts, NotExactError, facts_of, shard
from lightning_dist.elastic.plan import EpochPlan, Position, full_size
from lightning_dist.elastic.sampling import Cursor
from lightning_dist.elastic.state import ElasticState
from lightning_dist.elastic.stateful import Remembered, StatefulLoader
from lightning_dist.integrations.lightning import private

FINDERS = (BatchSizeFinder, LearningRateFinder)
"""Callbacks that train a little and restore what they found: as such, or for a ``Tuner``."""


class ElasticData:
    """How the samples of one fit are dealt.

    Args:
        trainer: whose settings in passes (accumulation, limits, validation interval) are
            translated where a step takes another number of passes than the script says.
        policy: see :func:`~lightning_dist.elastic.layout.layout_for`.
        exact: raise for a loader whose position cannot be kept; otherwise warn.
        resumed: what a checkpoint said; None for a fresh start.
        begun: the layout of a start that left no checkpoint; its global batch is kept too, if the
            script still asks for the same batches.
        seed: of the order.
        on_first: called before the first batch is drawn in this process.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        *,
        policy: BatchPolicy,
        exact: bool,
        resumed: ElasticState | None,
        begun: Layout | None,
        seed: int,
        on_first: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._policy = policy
        self._exact = exact
        self._resumed = resumed
        self._begun = begun
        self._seed = seed
        self._on_first = on_first
        self._accumulate: int = trainer.accumulate_grad_batches
        self._limit: Any = trainer.limit_train_batches
        self._interval: Any = trainer.val_check_interval
        self.cursor = Cursor()
        self.is_known = False
        """Whether the loader has been made."""
        self.remembered: Remembered | None = None
        """The loader, if it keeps its position itself."""
        self.facts: LoaderFacts | None = None
        self.first: Layout | None = None
        self.layout: Layout | None = None
        self._epoch_size: int | None = None
        if resumed is not None:
            self.cursor.begin = resumed.position

    @property
    def is_dealt(self) -> bool:
        """Whether the position in the data is known by samples."""
        return self.facts is not None

    @property
    def size(self) -> int | None:
        """Samples of an epoch, as the dataset has them."""
        return None if self.facts is None else self.facts.size

    def deal(self, loader: Any) -> Any:
        """This rank's share of the user's ``loader``. On all ranks."""
        self.is_known = True
        try:
            self.facts = facts_of(loader, seed=self._seed)
        except NotExactError as reason:
            return self._leave(loader, reason)
        first = self._first_layout()
        self.layout = layout_for(self._policy, first, script=self._script_layout())
        self.first = first
        limit = self._limited(first, self.facts)
        self._epoch_size = full_size(self.facts.size, limit_passes=limit, layout=first)
        self._translate(first, self.layout)
        return shard(
            loader,
            self.plan,
            cursor=self.cursor,
            seed=self._seed,
            on_first=self._on_first if loader.num_workers == 0 else lambda: None,
        )

    def _leave(self, loader: Any, reason: NotExactError) -> Any:
        """Take a loader as it is."""
        if self._policy not in ("constant_global", "fixed_micro"):
            raise ValueError(
                f"batch_policy={self._policy!r} could not take effect: {reason}; or set "
                "batch_policy='fixed_micro'"
            )
        if isinstance(loader, StatefulLoader):
            self.remembered = Remembered(loader, back=self._accumulate + 2)
            if (own := self._own_state()) is not None:
                loader.load_state_dict(own)
            return self.remembered
        if self._exact:
            raise ValueError(
                f"{reason}; or set exact_data=False: then a restart begins the epoch anew"
            )
        rank_zero_warn(
            f"not exact: {reason}. A restart goes on at the begin of its epoch, whose samples are "
            "seen again, in an order that depends on the number of ranks"
        )
        return loader

    @property
    def resumed_loader(self) -> Any:
        """The position that the loader was given; None if it begins at its begin."""
        return None if self.remembered is None else self._own_state()

    @property
    def goes_on_by_itself(self) -> bool:
        """Whether the loader was given its own position."""
        return self.resumed_loader is not None

    def _own_state(self) -> Any:
        """Of this rank's loader, if there were as many."""
        states = [] if self._resumed is None else self._resumed.loaders
        before, now = len(states), self._trainer.world_size
        if before == now:
            return states[self._trainer.global_rank]
        if before and self._exact:
            raise ValueError(
                f"this loader keeps its position itself, on each rank, and that of {before} ranks "
                f"does not serve {now}; start {before} ranks, use a map-style dataset, or set "
                "exact_data=False: then the epoch begins anew"
            )
        return None

    def _first_layout(self) -> Layout:
        assert self.facts is not None
        if self._resumed is not None:
            return self._resumed.first
        now = self._script_layout()
        begun = self._begun
        if begun is None or replace(now, world_size=0, global_batch=0) != replace(
            begun, world_size=0, global_batch=0
        ):
            return now
        return begun

    def _script_layout(self) -> Layout:
        return Layout.of_script(
            world_size=self._trainer.world_size,
            micro_batch=1 if self.facts is None else self.facts.batch_size,
            accumulate=self._accumulate,
        )

    def layouts(self) -> tuple[Layout, Layout]:
        """Of the run's first start, and now. Samples are counted as batches where nobody knows."""
        if self.first is not None and self.layout is not None:
            return self.first, self.layout
        now = self._script_layout()
        return (now if self._resumed is None else self._resumed.first), now

    def plan(self) -> EpochPlan:
        """The passes of the present epoch on this rank."""
        assert self.facts is not None
        assert self.layout is not None
        assert self._epoch_size is not None
        return EpochPlan(
            self.layout,
            self._trainer.global_rank,
            self.cursor.begin,
            self._epoch_size,
            drop_last=self.facts.drop_last,
        )

    def _limited(self, first: Layout, facts: LoaderFacts) -> int | None:
        """Passes of an epoch that the script wants, in the layout of the first start."""
        if isinstance(self._limit, int):
            return self._limit
        if self._limit == 1.0:
            return None
        whole = EpochPlan(first, 0, Position(), facts.size, facts.drop_last)
        return int(len(whole) * self._limit)

    def _translate(self, first: Layout, now: Layout) -> None:
        trainer: Any = self._trainer
        automatic = trainer.lightning_module.automatic_optimization
        if now.accumulate != self._accumulate and not automatic:
            raise ValueError(
                f"batch_policy='constant_global' takes {now.accumulate} passes per step on "
                f"{now.world_size} ranks, and with automatic_optimization=False the module decides "
                f"that; start {first.world_size} ranks, or use batch_policy='scale_lr'"
            )
        trainer.accumulate_grad_batches = now.accumulate
        trainer.limit_train_batches = 1.0  # the plan ends the epoch
        if isinstance(self._interval, int):
            trainer.val_check_interval = _translated(
                self._interval, first=first, now=now, what="val_check_interval"
            )

    def refresh(self) -> None:
        """Tell the trainer how long the present epoch is; a resumed one had another length."""
        loop = self._trainer.fit_loop
        loader = private.combined_train_loader(self._trainer)
        if not self.is_dealt or loader is None:
            return
        passes = len(self.plan())
        if loop.max_batches == passes:
            return
        if self._trainer.val_check_batch == loop.max_batches:
            self._trainer.val_check_batch = passes
        elif isinstance(self._trainer.val_check_interval, float):
            fraction = self._trainer.val_check_interval
            self._trainer.val_check_batch = max(1, int(passes * fraction))
        loader.limits = [passes]
        loop.max_batches = passes

    def close(self) -> None:
        """No more batches are wanted; give the trainer back what its user has set.

        Where validation fails, Lightning leaves the workers of training to the garbage collector,
        which closes their queues before they are told to end, and then waits 5 s for each.
        """
        trainer: Any = self._trainer
        trainer.fit_loop.teardown()
        if self.remembered is not None:
            self.remembered.close()
        trainer.accumulate_grad_batches = self._accumulate
        trainer.limit_train_batches = self._limit
        trainer.val_check_interval = self._interval


def _translated(passes: int, *, first: Layout, now: Layout, what: str) -> int:
    steps, rest = divmod(passes, first.accumulate)
    if now.accumulate == first.accumulate:
        return passes
    if rest:
        raise ValueError(
            f"{what}={passes} passes are no whole number of steps of {first.accumulate} passes, "
            f"and {now.world_size} ranks take {now.accumulate}; make it a multiple of "
            f"{first.accumulate}"
        )
    return steps * now.accumulate


def require_plain_trainer(trainer: pl.Trainer) -> None:
    """Raise a ValueError for settings that ElasticRestart could not keep over a restart."""
    if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
        raise ValueError(
            "ElasticRestart deals every sample once per epoch, so overfit_batches could not take "
            "effect; set overfit_batches=0, or leave ElasticRestart out"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            raise ValueError(
                "ElasticRestart decides how many passes a step takes, so a "
                "GradientAccumulationScheduler could not take effect; set accumulate_grad_batches="
            )
        if isinstance(callback, FINDERS):
            name = type(callback).__name__
            raise ValueError(
                f"ElasticRestart goes on from a checkpoint at every start, and {name} would search "
                "again there and restore a checkpoint of its own over it; search before fit(), "
                "with a Tuner(trainer), and leave the callback out"
            )


def is_trial(trainer: pl.Trainer) -> bool:
    """Whether this fit is not of the run: ``fast_dev_run``, or the search of a ``Tuner``."""
    inner: Any = trainer
    searches = (each for each in inner.callbacks if isinstance(each, FINDERS))
    return bool(inner.fast_dev_run) or any(map(private.is_searching, searches))
