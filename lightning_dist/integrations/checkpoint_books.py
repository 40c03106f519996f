"""The books of a ModelCheckpoint after a checkpoint that was never written."""

from __future__ import annotations

from lightning.pytorch.callbacks import ModelCheckpoint


def forget(callback: ModelCheckpoint, path: str, *, kept: str) -> None:
    """Take ``path`` out of the paths that users read.

    Args:
        callback: whose books they are.
        path: where a file should have been.
        kept: the newest checkpoint that is there, or an empty string.
    """
    callback.best_k_models.pop(path, None)
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
