"""Corrections of the attributes of a ModelCheckpoint after a failed save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

Scores = Mapping[str, Tensor]
"""Scores of checkpoints by path."""


class Displaced:
    """Entries that each save removed from ``best_k_models``, until it has succeeded or failed."""

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

    def fail_all(self, paths: Iterable[str]) -> dict[str, Tensor]:
        """None of ``paths`` was written; what is among the best again."""
        back: dict[str, Tensor] = {}
        for path in paths:
            back.pop(path, None)
            back.update(self.fail(path))
        return back

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
