"""Data of a trainer that can be resharded, and trainings whose data cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from typing_extensions import override

from lightning_dist.checkpoint.reading import require_loadable
from lightning_dist.elastic.data.plan import EpochPlan, Layout, Position
from lightning_dist.elastic.data.sharding import (
    DataShards,
    LoaderFacts,
    NotExactError,
    Remembered,
)
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.checkpoint.async_checkpoint import AsyncCheckpoint
from lightning_dist.frameworks.lightning.checkpoint.private import checkpoint_folder
from lightning_dist.frameworks.lightning.elastic import private

_STATEFUL = ("__iter__", "state_dict", "load_state_dict")
"""Methods of a loader that keeps its position itself."""


class TrainerDataShards(DataShards):
    """Sharding of the samples of one fit.

    Args:
        trainer: whose settings in micro-batches (accumulation, limits, validation interval) are
            translated where a step takes another number of micro-batches than the script says.
        exact: raise for a loader whose position cannot be kept; otherwise warn.
        on_first: called before the first batch is drawn in this process.
        **shards: as of :class:`.DataShards`.
    """

    def __init__(
        self, trainer: pl.Trainer, *, exact: bool, on_first: Callable[[], None], **shards: Any
    ) -> None:
        super().__init__(
            accumulate=trainer.accumulate_grad_batches,
            **shards,
        )
        self._trainer = trainer
        self._exact = exact
        self._on_first = on_first
        self._limit: Any = trainer.limit_train_batches
        self._interval: Any = trainer.val_check_interval
        self.is_known = False
        """Whether the loader has been made."""
        self.remembered: Remembered | None = None
        """The loader, if it keeps its position itself."""
        self.own_state: Any = None
        """The position that such a loader was given; None if it begins at its begin."""

    @property
    def given(self) -> dict[str, Any]:
        """Settings of the user's script for steps and epochs, by name."""
        return {
            "accumulate_grad_batches": self._accumulate,
            "limit_train_batches": self._limit,
            "val_check_interval": self._interval,
            "batch size": self.facts and self.facts.batch_size,
            "drop_last": self.facts and self.facts.drop_last,
        }

    def take(self, loader: Any) -> Any:
        """This rank's share of the user's ``loader``, or the loader as it is. On all ranks."""
        self.is_known = True
        in_process = getattr(loader, "num_workers", 0) == 0
        on_first = self._on_first if in_process else lambda: None
        try:
            return self.shard(loader, on_first=on_first)
        except NotExactError as reason:
            return self._leave(loader, reason)

    def _leave(self, loader: Any, reason: NotExactError) -> Any:
        """Take a loader as it is."""
        if self.policy not in ("fixed_global_batch", "fixed_micro_batch"):
            raise ValueError(
                f"batch_policy={self.policy!r} cannot take effect: {reason}; or set "
                "batch_policy='fixed_micro_batch'"
            )
        if all(callable(getattr(loader, name, None)) for name in _STATEFUL):
            self.remembered = Remembered(loader, back=self._accumulate + 2)
            self.own_state = self._find_own_state()
            if self.own_state is not None:
                loader.load_state_dict(self.own_state)
            return self.remembered
        if self._exact:
            raise ValueError(
                f"{reason}; or set strict_data=False: then a restart repeats the epoch from its "
                "start"
            )
        rank_zero.warn(
            f"Not exact: {reason}. A restart resumes at the start of its epoch, whose samples are "
            "seen again, in an order that depends on the number of ranks"
        )
        return loader

    def _find_own_state(self) -> Any:
        """Position of this rank's loader, if there were as many."""
        states = [] if self.resumed is None else self.resumed.loaders
        before, now = len(states), self.world_size
        if before == now:
            return states[self.rank]
        if before and self._exact:
            raise ValueError(
                "This loader keeps its position itself, on each data-parallel rank, and that of "
                f"{before} ranks does not serve {now}; start {before}, use a map-style dataset, or "
                "set strict_data=False: then the epoch is repeated from its start"
            )
        return None

    @override
    def limit(self, first: Layout, facts: LoaderFacts) -> int | None:
        if isinstance(self._limit, int):
            return self._limit
        if self._limit == 1.0:
            return None
        whole = EpochPlan(first, 0, Position(), facts.size, facts.drop_last)
        return int(len(whole) * self._limit)

    @property
    def _whole(self) -> int:
        """Passes of an epoch in the layout of the first start."""
        assert self.first is not None
        assert self.facts is not None
        size, drop_last = self._epoch_size, self.facts.drop_last
        return len(EpochPlan(self.first, 0, Position(), size, drop_last))

    @override
    def accept(self, first: Layout, now: Layout) -> None:
        trainer: Any = self._trainer
        automatic = trainer.lightning_module.automatic_optimization
        if now.accumulate != self._accumulate and not automatic:
            raise ValueError(
                f"batch_policy='fixed_global_batch' takes {now.accumulate} micro-batches per step "
                f"on {now.world_size} ranks, and with automatic_optimization=False the module "
                f"decides that; start {first.world_size} ranks, or use batch_policy='scale_lr'"
            )
        trainer.accumulate_grad_batches = now.accumulate
        trainer.limit_train_batches = 1.0  # the plan ends the epoch
        if isinstance(self._interval, int):
            trainer.val_check_interval = _translated(
                self._interval, first=first, now=now, setting="val_check_interval"
            )

    @override
    def reshard(self, position: Position, *, rank: int, world_size: int) -> None:
        self.cursor.set_epoch(position.epoch)
        super().reshard(position, rank=rank, world_size=world_size)
        self.refresh()

    def refresh(self) -> None:
        """Tell the trainer how long the present epoch is; a resumed one had another length."""
        trainer: Any = self._trainer
        loop, interval = trainer.fit_loop, trainer.val_check_interval
        loader = private.combined_train_loader(trainer)
        if not self.is_sharded or loader is None:
            return
        passes = len(self.plan())
        if loop.max_batches == passes:
            return
        if isinstance(interval, float):
            trainer.val_check_batch = max(1, int(passes * interval))
        elif isinstance(interval, int):
            # The last step of an epoch may be smaller: its end need not be a multiple of this.
            trainer.val_check_batch = passes if self._interval == self._whole else interval
        loader.limits = [passes]
        loop.max_batches = passes

    @override
    def close(self) -> None:
        """No more batches are wanted; give the trainer back what its user has set.

        Where validation fails, Lightning leaves the workers of training to the garbage collector,
        which closes their queues before they are asked to end, and then waits 5 s for each.
        """
        trainer: Any = self._trainer
        super().close()  # before the loop forgets iterators that are not torch's own
        trainer.fit_loop.teardown()
        if self.remembered is not None:
            self.remembered.close()
        trainer.accumulate_grad_batches = self._accumulate
        trainer.limit_train_batches = self._limit
        trainer.val_check_interval = self._interval


def _translated(passes: int, *, first: Layout, now: Layout, setting: str) -> int:
    steps, rest = divmod(passes, first.accumulate)
    if now.accumulate == first.accumulate:
        return passes
    if rest:
        raise ValueError(
            f"{setting}={passes} micro-batches are no whole number of steps of {first.accumulate}, "
            f"and {now.world_size} ranks take {now.accumulate}; make it a multiple of "
            f"{first.accumulate}"
        )
    return steps * now.accumulate


FINDERS = (BatchSizeFinder, LearningRateFinder)
"""Callbacks that train a little and restore what they found: as such, or for a ``Tuner``."""


def require_plain_trainer(trainer: pl.Trainer) -> None:
    """Raise a ValueError for settings that ElasticRestart could not keep over a restart."""
    if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
        raise ValueError(
            "ElasticRestart uses every sample once per epoch, so overfit_batches cannot take "
            "effect; set overfit_batches=0, or leave ElasticRestart out"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            raise ValueError(
                "ElasticRestart decides how many micro-batches a step takes, so a "
                "GradientAccumulationScheduler cannot take effect; set accumulate_grad_batches="
            )
        if isinstance(callback, FINDERS):
            name = type(callback).__name__
            raise ValueError(
                f"ElasticRestart resumes from a checkpoint at every start, and {name} would search "
                "again there and restore a checkpoint of its own over it; search before fit(), "
                "with a Tuner(trainer), and leave the callback out"
            )


def require_recoverable_fit(trainer: pl.Trainer, data: TrainerDataShards) -> None:
    """Raise a ValueError for a fit whose steps cannot be taken again where a rank is lost."""
    optimizers: Any = trainer.optimizers
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    wrong = {
        f"{len(kinds)} optimizers": len(kinds) != 1,
        "automatic_optimization=False": not trainer.lightning_module.automatic_optimization,
        "a GradScaler under a Trainer": getattr(trainer.precision_plugin, "scaler", None)
        is not None,
        "LBFGS, which computes gradients several times in a step": "LBFGS" in kinds,
        "a train dataloader whose samples cannot be resharded": not data.is_sharded,
    }
    sharded = [saver for saver in trainer.checkpoint_callbacks if _is_sharded(saver)]
    wrong["a checkpoint with format='sharded', which all of the first ranks write"] = bool(sharded)
    for feature, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(
                f"recovery='in_process' does not support {feature}; use recovery='restart'"
            )


def _is_sharded(callback: Any) -> bool:
    return isinstance(callback, AsyncCheckpoint) and callback.settings.sharded


def is_trial(trainer: pl.Trainer) -> bool:
    """Whether this fit is not of the run: ``fast_dev_run``, or the search of a ``Tuner``."""
    inner: Any = trainer
    searches = (callback for callback in inner.callbacks if isinstance(callback, FINDERS))
    return bool(inner.fast_dev_run) or any(map(private.is_searching, searches))


def require_own_folder(trainer: pl.Trainer, folder: str) -> None:
    """Raise ValueError if another callback saves into ``folder``."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and (
            checkpoint_folder(callback, trainer) == folder
        ):
            raise ValueError(
                f"{type(callback).__name__} saves into {folder} too, and a start could resume from "
                "its checkpoints; give it a folder of its own with dirpath="
            )


def refuse_choices(arguments: Mapping[str, Any], of: object) -> None:
    """Raise ValueError for arguments of a ModelCheckpoint."""
    if taken := sorted(arguments.keys() & signature(ModelCheckpoint).parameters.keys()):
        raise ValueError(
            f"ElasticRestart keeps the newest checkpoints (max_to_keep=), so {', '.join(taken)} "
            "cannot take effect; add an AsyncCheckpoint with a folder of its own for the best"
        )


def require_loadable_hparams(trainer: pl.Trainer) -> None:
    """Raise ValueError for what ``save_hyperparameters`` keeps and no start could load."""
    inner: Any = trainer
    for owner in (trainer.lightning_module, inner.datamodule):
        hparams = getattr(owner, "hparams", None)
        if hparams:
            name = f"{type(owner).__name__}.hparams"
            plain = dict(hparams) if isinstance(hparams, dict) else hparams
            require_loadable(plain, name=name)
