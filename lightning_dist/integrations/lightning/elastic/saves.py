"""Which checkpoints a run keeps to go on from: the newest."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_dist.checkpoint.disk.scan import saved_by
from lightning_dist.checkpoint.restricted import require_loadable
from lightning_dist.integrations.lightning.checkpoint.async_checkpoint import AsyncCheckpoint
from lightning_dist.integrations.lightning.checkpoint.bookkeeping import forget
from lightning_dist.integrations.lightning.private import checkpoint_folder

_PATIENCE = 5.0
"""Seconds that a failed process waits for its checkpoints: the next one waits for their writer."""


class NewestCheckpoint(AsyncCheckpoint):
    """Keeps the newest checkpoints of one folder, after steps or after epochs or both.

    Args:
        dirpath: the folder.
        every_n_train_steps: optimizer steps between two. None: at the end of epochs only.
        every_n_epochs: epochs between two. None: 1, unless ``every_n_train_steps`` is given.
        keep: how many stay.
        **kwargs: as of :class:`~lightning_dist.AsyncCheckpoint`, but for what says which are kept.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    def __init__(
        self,
        dirpath: Any,
        *,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        keep: int,
        **kwargs: Any,
    ) -> None:
        _require_keywords(kwargs)
        if not dirpath:
            raise ValueError("dirpath is the folder that every start looks into; give one")
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(
                f"every_n_train_steps has to be positive, got {every_n_train_steps}; leave it out "
                "to save at the end of epochs only"
            )
        if keep < 1 or (every_n_epochs is not None and every_n_epochs < 0):
            raise ValueError(
                "keep has to be positive, and every_n_epochs not negative; got "
                f"{keep} and {every_n_epochs}"
            )
        if not every_n_train_steps and every_n_epochs == 0:
            raise ValueError(
                "checkpoints are taken neither after steps nor after epochs; set "
                "every_n_train_steps= or every_n_epochs="
            )
        # ModelCheckpoint takes one trigger. That at the end of an epoch is ours.
        if every_n_train_steps:
            kwargs["every_n_train_steps"] = every_n_train_steps
        super().__init__(dirpath, monitor="step", mode="max", save_top_k=keep, **kwargs)
        self._each_epochs = (
            (0 if every_n_train_steps else 1) if every_n_epochs is None else every_n_epochs
        )
        self._patience = _PATIENCE

    def _require_own_folder(self, trainer: pl.Trainer) -> None:
        own = checkpoint_folder(self, trainer)
        for other in trainer.checkpoint_callbacks:
            if other is self or not isinstance(other, ModelCheckpoint):
                continue
            if checkpoint_folder(other, trainer) == own:
                raise ValueError(
                    f"{type(other).__name__} saves into {own} too, and a start would go on from "
                    "its checkpoints; give it a folder of its own with dirpath="
                )

    def _take_over(
        self, trainer: pl.Trainer, *, run: str, resumed: str | None, weights_only: bool
    ) -> None:
        """Keep the newest that ``run`` has saved here, and remove the rest at the next save.

        What ``resumed`` says is not enough: a killed process may not have removed what
        they left out, and what is newer was damaged. Collective.
        """
        if self._session is None:
            return
        self._session.save_for(run, weights_only=weights_only)
        own: list[tuple[str, int]] = []
        if trainer.is_global_zero:
            found = saved_by(run, checkpoint_folder(self, trainer), resumed=resumed)
            own = [(each.path, each.origin.step) for each in found if each.origin]
        own = trainer.strategy.broadcast(own)
        newest = own[-1][1] if own else 0  # later steps were passed over: they do not count
        few = [(path, step) for path, step in own[-self.save_top_k :] if step <= newest]
        kept = {path: torch.tensor(step) for path, step in few}
        self.best_k_models = {}
        forget(self, "", kept="", back=kept)
        for path, _ in own:
            if path not in kept:
                self._session.remove(path)

    @override
    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        """Also what the trainer has resumed from: it is one of the newest, until it is not."""
        return previous != current

    def _stand_last(self, trainer: pl.Trainer) -> None:
        """Let another callback be ``trainer.checkpoint_callback``, which knows what is best."""
        inner: Any = trainer
        inner.callbacks = [*(each for each in inner.callbacks if each is not self), self]

    def _ModelCheckpoint__warn_if_dir_not_empty(self, dirpath: Any) -> None:
        """That there are checkpoints is what a restart is for."""

    @override
    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        # What a module logs under these names does not say what is newest.
        step, epoch = torch.tensor(trainer.global_step), torch.tensor(trainer.current_epoch)
        return {**super()._monitor_candidates(trainer), "step": step, "epoch": epoch}

    def _is_due_after_epoch(self, trainer: pl.Trainer) -> bool:
        each = self._every_n_train_steps
        by_steps = each >= 1 and trainer.global_step % each == 0
        by_epochs = self._each_epochs and (trainer.current_epoch + 1) % self._each_epochs == 0
        return bool(by_steps or by_epochs)

    def _save_now(self, trainer: pl.Trainer) -> None:
        """Save this step, if it is not saved yet."""
        if self._session is not None and self._last_global_step_saved != trainer.global_step:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _save_at_last(self, trainer: pl.Trainer) -> None:
        """Save this step, and skip nothing, whatever ``on_busy`` says."""
        self._await_saves()
        self._save_now(trainer)

    def _save_for_good(self, trainer: pl.Trainer) -> int | None:
        """Save this step, and wait; step of the newest checkpoint that is durable then."""
        self._await_saves()
        if self._durable_step(trainer) != trainer.global_step:
            self._last_global_step_saved = -1  # a save of this step that was asked for has failed
        self._save_at_last(trainer)
        if self._session is not None:
            self._session.flush_removals()
            self._await_saves()
            self._session.agree_on_failures()
        return self._durable_step(trainer)

    def _durable_step(self, trainer: pl.Trainer) -> int | None:
        """Step of the newest checkpoint of this start that is durable; collective."""
        last = self.last_committed
        step = None if last is None else last.origin.step
        durable: int | None = trainer.strategy.broadcast(step)  # of rank 0, which publishes
        return durable

    def _await_saves(self) -> None:
        """Return when all that this rank writes is durable."""
        self._is_saved_within(None)

    def _is_saved_within(self, seconds: float | None) -> bool:
        """Wait for what this rank writes, for so long; whether all of it is durable."""
        if self._session is not None:
            try:
                self._session.drain(seconds)
            except TimeoutError:
                return False
        return True


def require_loadable_hparams(trainer: pl.Trainer) -> None:
    """Raise ValueError for what ``save_hyperparameters`` keeps and no start could load."""
    inner: Any = trainer
    for each in (trainer.lightning_module, inner.datamodule):
        hparams = getattr(each, "hparams", None)
        if hparams:
            name = f"{type(each).__name__}.hparams"
            plain = dict(hparams) if isinstance(hparams, dict) else hparams
            require_loadable(plain, name=name)


def _require_keywords(kwargs: dict[str, Any]) -> None:
    ours = {"monitor", "mode", "save_top_k", "save_last", "train_time_interval"}
    ours |= {"save_weights_only", "save_on_train_epoch_end", "save_on_exception"}
    if taken := sorted(ours & kwargs.keys()):
        raise ValueError(
            f"ElasticRestart keeps the newest checkpoints (keep=), so {', '.join(taken)} could not "
            "take effect; use an AsyncCheckpoint beside it, with a folder of its own, for the best"
        )
