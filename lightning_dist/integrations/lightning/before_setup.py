"""A hook that comes before Lightning's first."""

from __future__ import annotations

import lightning.pytorch as pl


class BeforeSetup:
    """A callback that our strategies call when ranks are known and loggers have not begun."""

    def before_setup(self, trainer: pl.Trainer) -> None:
        """Called on every rank."""


def call_before_setup(module: pl.LightningModule | None) -> None:
    """Call :class:`BeforeSetup` callbacks; None: there is no Trainer, which alone has callbacks."""
    if module is None:
        return
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BeforeSetup):
            callback.before_setup(module.trainer)
