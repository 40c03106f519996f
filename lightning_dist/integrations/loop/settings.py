"""What users set of an ElasticLoop."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from lightning_dist.elastic.layout import BatchPolicy, require_policy


@dataclass(frozen=True)
class LoopSettings:
    """When an ElasticLoop saves and how it deals; see there.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    dirpath: str | os.PathLike[str]
    every_n_steps: int | None
    every_n_epochs: int
    keep: int
    batch_policy: BatchPolicy
    accumulate: int
    device: Any
    seed: int | None
    weights_only: bool
    signals: tuple[signal.Signals, ...]

    def __post_init__(self) -> None:
        require_policy(self.batch_policy)
        for name in ("every_n_steps", "keep", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} has to be positive; got {value}")
        if self.every_n_epochs < 0 or not (self.every_n_steps or self.every_n_epochs):
            raise ValueError(
                "checkpoints are taken after steps, after epochs or both; got "
                f"every_n_steps={self.every_n_steps} and every_n_epochs={self.every_n_epochs}"
            )

    @property
    def folder(self) -> str:
        """An absolute path, or a URL."""
        folder = os.fspath(self.dirpath)
        return folder if "://" in folder else os.path.abspath(folder)

    def is_due_after_step(self, steps: int) -> bool:
        """Whether to save when so many steps are done."""
        return self.every_n_steps is not None and steps % self.every_n_steps == 0

    def is_due_after_epoch(self, epoch: int, *, steps: int) -> bool:
        """Whether to save when ``epoch``, counted from 0, has ended."""
        by_epochs = self.every_n_epochs > 0 and (epoch + 1) % self.every_n_epochs == 0
        return by_epochs or self.is_due_after_step(steps)
