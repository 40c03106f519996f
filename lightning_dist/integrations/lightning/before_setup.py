"""A hook that comes before Lightning's first."""

from __future__ import annotations

import lightning.pytorch as pl


class BeforeSetup:
    """A callback that our strategies call when ranks are known and loggers have not begun."""

    def before_setup(self, trainer: pl.Trainer) -> None:
        """Called on every rank."""
