"""What became of saves: told to the user, agreed upon by all ranks, and put right in the
attributes of the ModelCheckpoint that asked for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.failures import failure, is_fatal
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.integrations.lightning.checkpoint.io import raise_all

Scores = Mapping[str, Tensor]
"""Scores of checkpoints by path."""


class Displaced:
    """What each save has put out of ``best_k_models``, until it is known whether it succeeded."""

    def __init__(self) -> None:
        self._by: dict[str, dict[str, Tensor]] = {}

    def note(self, path: str, *, before: Scores, after: Scores) -> None:
        """A save of ``path`` has been asked for, and changed ``best_k_models`` so."""
        self._by[path] = {
            old: score for old, score in before.items() if old not in after or old == path
        }

    def commit(self, path: str) -> None:
        """``path`` is there."""
        self._by.pop(path, None)

    def fail(self, path: str) -> Scores:
        """``path`` was not written; what is among the best again."""
        back = self._by.pop(path, {})
        for displaced in self._by.values():
            if path in displaced:  # the save that displaced it would have displaced these
                del displaced[path]
                displaced.update(back)
                return {}
        return back


def forget(callback: ModelCheckpoint, path: str, *, kept: str, back: Scores | None = None) -> None:
    """Take ``path`` out of the paths that users read.

    Args:
        callback: whose paths they are.
        path: where a file should have been.
        kept: the newest checkpoint that is there, or an empty string.
        back: what is among the best again.
    """
    callback.best_k_models.pop(path, None)
    callback.best_k_models.update(back or {})
    if callback.last_model_path == path:
        callback.last_model_path = kept
    if callback.monitor is None:
        if callback.best_model_path == path:
            callback.best_model_path = kept
        return
    best, worst = (min, max) if callback.mode == "min" else (max, min)
    models = callback.best_k_models
    callback.best_model_path = best(models, key=models.__getitem__) if models else ""
    callback.best_model_score = models.get(callback.best_model_path)
    callback.kth_best_model_path = worst(models, key=models.__getitem__) if models else ""
    if models:
        callback.kth_value = models[callback.kth_best_model_path]


class Files(Protocol):
    """The checkpoints of a fit."""

    def keep(self, path: str) -> None: ...

    def is_pending(self, path: str) -> bool: ...

    def wait(self, timeout: float | None = None) -> None: ...


class Outcomes:
    """Events of one rank on their way to the others.

    Args:
        files: what the saves were asked of.
        callback: whose paths say what is there.
    """

    def __init__(
        self,
        files: Files,
        settings: CheckpointSettings,
        *,
        callback: ModelCheckpoint,
        trainer: pl.Trainer,
    ) -> None:
        self._files, self._callback, self._trainer = files, callback, trainer
        self._raises = settings.on_error == "raise"
        self._failed: list[Failed] = []  # not yet known to the other ranks
        self._committed: list[str] = []  # likewise
        self.displaced = Displaced()

    def add(self, event: Committed | Failed) -> None:
        if isinstance(event, Failed):
            self._failed.append(event)
        else:
            self._committed.append(event.target)

    def raise_fatal(self, last: Committed | None) -> None:
        """Raise CheckpointError for the failures that end the training; on rank 0 only.

        Args:
            last: the newest checkpoint that is there.
        """
        raises = self._raises and self._trainer.is_global_zero
        fatal = [event for event in self._failed if is_fatal(event)] if raises else []
        if fatal:
            self._failed = [event for event in self._failed if event not in fatal]
            self._correct(fatal, last)
            raise_all(failure(event, last) for event in fatal)

    def warn(self, last: Committed | None) -> None:
        """Say what failed; on this rank alone, since the training is over."""
        failed, self._failed = self._failed, []
        self._correct(failed, last)
        for event in failed:
            rank_zero_warn(failure(event, last))

    def _correct(self, failed: Iterable[Failed], last: Committed | None) -> None:
        targets = [event.target for event in failed]
        self._forget(targets, kept=last.target if last else "", back=self._back(targets))

    def agree(self, last: Committed | None) -> None:
        """Raise for all failures, or say them, on all ranks; and forget them. Collective."""
        found = [(e.target, failure(e, last), is_fatal(e)) for e in self._failed]
        is_gone = bool(found) and self._last_is_gone()
        news = (found, self._committed, last.target if last else "", is_gone)
        self._failed, self._committed = [], []
        found, committed, kept, is_gone = self._trainer.strategy.broadcast(news)
        for target in committed:
            self.displaced.commit(target)
        if found:
            targets = [target for target, *_ in found]
            back = self._trainer.strategy.broadcast(self._back(targets))
            self._forget(targets, kept=kept, back=back)
        if is_gone:
            self._callback.last_model_path = ""
        for _, message, fatal in found:
            if not (self._raises and fatal):
                rank_zero_warn(message)
        raise_all(message for _, message, fatal in found if self._raises and fatal)

    def _back(self, targets: Iterable[str]) -> dict[str, Any]:
        """What is among the best again since ``targets`` failed, as far as it is still there."""
        back: dict[str, Any] = {}
        for target in targets:
            back.pop(target, None)
            back.update(self.displaced.fail(target))
        for path in back:
            self._files.keep(path)
        if back:
            self._files.wait()  # a later save that is under way may have removed it
        return {path: score for path, score in back.items() if get_filesystem(path).exists(path)}

    def _forget(self, targets: list[str], *, kept: str, back: Scores) -> None:
        for target in targets:
            forget(self._callback, target, kept=kept, back=back if target == targets[-1] else None)

    def _last_is_gone(self) -> bool:
        """Whether nothing has the name of the last checkpoint, which failed to be the first."""
        path = self._callback.last_model_path
        if not path or self._files.is_pending(path):
            return False
        return not get_filesystem(path).exists(path)
