"""Settings of a run: checkpoints, sharding of the data, time limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_dist.base.features import RECOVERY
from lightning_dist.checkpoint.settings import CheckpointSettings, require_choices
from lightning_dist.elastic.data.plan import BatchPolicy

RecoveryMode = Literal["restart", "in_process"]
"""Reaction of the remaining ranks to a lost one: restart, or continue."""


def require_recovery(recovery: str) -> None:
    """Raise ValueError if there is no such way, ImportError if this torch has no means for it."""
    if recovery not in get_args(RecoveryMode):
        names = " or ".join(map(repr, get_args(RecoveryMode)))
        raise ValueError(f"recovery must be {names}; got {recovery!r}")
    if recovery == "in_process":
        RECOVERY.require()


def require_mirror(mirror: bool | int, *, recovery: RecoveryMode) -> int | None:
    """Steps between two copies of residuals; None: there are none.

    Raises:
        ValueError: the number is not positive, or there is nobody to take copies over.
    """
    if mirror is False:
        return None
    if mirror < 1:
        raise ValueError(
            f"mirror_residuals must be True, False or the steps between two copies; got {mirror}"
        )
    if recovery != "in_process":
        raise ValueError(
            f"mirror_residuals={mirror} takes effect with recovery='in_process' only, where other "
            "ranks take residuals over; leave it out: checkpoints have the residuals of all ranks"
        )
    return int(mirror)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, in a Trainer or a loop; see ElasticRestart.

    Args:
        saving: how checkpoints are taken and written.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    dirpath: str | os.PathLike[str]
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    max_to_keep: int = 2
    batch_policy: BatchPolicy = "fixed_global_batch"
    seed: int | None = None
    weights_only: bool = True
    preemption_check: Callable[[], bool] | None = None
    preemption_poll_interval: float = 5.0
    grace_period: float = 25.0
    hang_timeout: float | None = 600.0
    saving: CheckpointSettings = field(default_factory=CheckpointSettings)
    format: Literal["single", "sharded"] = "single"

    def __post_init__(self) -> None:
        require_choices(self)
        if not self.dirpath:
            raise ValueError("dirpath must be the folder of the checkpoints, got none")
        positive = ("every_n_train_steps", "max_to_keep")
        for name in (*positive, "preemption_poll_interval", "grace_period"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive; got {value}")
        if self.hang_timeout is not None and self.hang_timeout <= 0:
            raise ValueError(
                f"hang_timeout must be positive, or None for never; got {self.hang_timeout}"
            )
        if self._epochs_between < 0 or not (self.every_n_train_steps or self._epochs_between):
            raise ValueError(
                "Checkpoints are taken after steps, after epochs or both; got every_n_train_steps="
                f"{self.every_n_train_steps} and every_n_epochs={self.every_n_epochs}"
            )

    @property
    def sharded(self) -> bool:
        """Whether every rank writes its part of a checkpoint."""
        return self.format == "sharded"

    def require_recoverable(self) -> None:
        """Raise a ValueError if checkpoints need ranks that may be lost in the process."""
        if self.sharded:
            raise ValueError(
                "recovery='in_process' needs checkpoints that one rank can write, and with "
                "format='sharded' all write; use format='single', or recovery='restart'"
            )

    @property
    def _epochs_between(self) -> int:
        """Epochs between two checkpoints at the end of an epoch; 0: there are none."""
        if self.every_n_epochs is None:
            return 0 if self.every_n_train_steps else 1
        return self.every_n_epochs

    @property
    def folder(self) -> str:
        """An absolute path, or a URL."""
        folder = os.fspath(self.dirpath)
        return folder if "://" in folder else os.path.realpath(os.path.expanduser(folder))

    def is_due_after_step(self, steps: int) -> bool:
        """Whether to save when so many steps are done."""
        return self.every_n_train_steps is not None and steps % self.every_n_train_steps == 0

    def is_due_after_epoch(self, epoch: int, *, steps: int) -> bool:
        """Whether to save when ``epoch``, counted from 0, has ended."""
        between = self._epochs_between
        return (between > 0 and (epoch + 1) % between == 0) or self.is_due_after_step(steps)
