"""Settings of a run that is restarted: checkpoints, data, time limits, and ranks that are lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from lightning_dist.base.features import RECOVERY
from lightning_dist.settings.declared import (
    REQUIRED,
    AllowedValues,
    check_values,
    choice,
    count,
    is_whole,
    number,
    optional,
    setting,
)

SAVES, IO, FILES = "checkpoints", "checkpoints of a CheckpointIO", "checkpoints of Accelerate"
"""Kinds of checkpoints, each with its settings."""


@dataclass(frozen=True)
class CheckpointSettings:
    """How checkpoints are taken and written.

    Without known optimizers ``snapshot="auto"`` is ``"blocking"``.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    kind: ClassVar[str] = SAVES

    snapshot: Literal["auto", "overlap", "blocking", "sync"] = setting(
        "auto",
        choice("auto", "overlap", "blocking", "sync"),
        '``"overlap"`` (also ``"auto"``): parameters and optimizer state are copied during the '
        'next forward and backward pass, all else at once. ``"blocking"``: everything is copied at '
        'once. ``"sync"``: training waits for the disk too.',
    )
    max_in_flight: int = setting(
        1,
        count("saves", least=1),
        "saves that may be under way; each has a copy of the state in host memory.",
    )
    on_busy: Literal["wait", "skip"] = setting(
        "wait",
        choice("wait", "skip"),
        'at that limit, ``"wait"``, or ``"skip"`` the save with a warning.',
        under=(SAVES, FILES),
    )
    writer: Literal["auto", "process", "thread"] = setting(
        "auto",
        choice("auto", "process", "thread"),
        '``"process"``, which finishes its work when the trainer is killed; ``"thread"``; '
        '``"auto"``: process, unless the files are in memory of this process.',
    )
    format: Literal["single", "sharded"] = setting(
        "single",
        choice("single", "sharded"),
        '``"single"``: one file for ``torch.load`` and plain Lightning, written by rank 0. '
        '``"sharded"``: a folder that any number of ranks loads; every rank writes an equal part '
        "of parameters and optimizer state, its own residuals, and with local steps its worker.",
        under=(SAVES,),
    )
    verify: Literal["resume", "always", "never"] = setting(
        "resume",
        choice("resume", "always", "never"),
        '``"resume"``: verify the checkpoint to resume from. ``"always"``: also every checkpoint '
        'written, before the one that it replaces is removed. ``"never"``.',
    )
    on_error: Literal["raise", "warn"] = setting(
        "raise",
        choice("raise", "warn"),
        'when a checkpoint could not be written, ``"raise"`` within one step, or ``"warn"`` and '
        "keep the earlier ones.",
    )
    host_memory_limit: int | None = setting(
        None,
        optional(count("bytes", least=1), "no limit"),
        "bytes that copies may take on a rank. None: no limit.",
        under=(SAVES, IO),
    )
    lock: bool = setting(
        True,
        choice(True, False),
        "lock the folder, so that no other trainer writes to it. ``False``: for file systems "
        "without locks; make sure that there is one trainer.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.snapshot == "sync" and self.on_busy == "skip":
            raise ValueError(
                "snapshot='sync' waits for every save, so on_busy='skip' cannot take effect; leave "
                "one of them out"
            )

    @property
    def sharded(self) -> bool:
        """Whether every rank writes its part of a checkpoint."""
        return self.format == "sharded"


@dataclass(frozen=True)
class CheckpointIOSettings(CheckpointSettings):
    """How a CheckpointIO takes and writes checkpoints: it does not know the optimizers."""

    kind: ClassVar[str] = IO

    snapshot: Literal["blocking", "sync"] = setting(
        "blocking",
        AllowedValues(
            "'blocking' or 'sync', for a CheckpointIO does not know the optimizers and cannot copy "
            "while training goes on (an AsyncCheckpoint can)",
            lambda value: value in ("blocking", "sync"),
        ),
        '``"blocking"``: everything is copied at once. ``"sync"``: training waits for the disk '
        "too.",
    )


@dataclass(frozen=True)
class FilesSettings(CheckpointSettings):
    """How the files of an Accelerator are taken and written."""

    kind: ClassVar[str] = FILES

    snapshot: Literal["auto", "blocking", "sync"] = setting(
        "auto",
        AllowedValues(
            "'auto', 'blocking' or 'sync', for accelerate writes its files at once",
            lambda value: value in ("auto", "blocking", "sync"),
        ),
        '``"blocking"`` (also ``"auto"``): ``save_state`` returns when the files are in memory. '
        '``"sync"``: when they are durable.',
    )


BatchPolicy = Literal["fixed_global_batch", "scale_lr", "scale_lr:sqrt", "fixed_micro_batch"]
RecoveryMode = Literal["restart", "in_process"]
"""Reaction of the remaining ranks to a lost one: restart, or continue."""
_SECONDS = number("seconds above 0", lambda value: value > 0)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, in a Trainer or a loop.

    Args:
        saving: how checkpoints are taken and written.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    dirpath: str | os.PathLike[str] = setting(
        REQUIRED,
        AllowedValues("the folder of the checkpoints", lambda value: bool(value)),
        "folder of the checkpoints, one per run: a path or an fsspec URL that all ranks see.",
        positional=True,
    )
    every_n_train_steps: int | None = setting(
        None,
        optional(count("steps", least=1), "at the end of epochs only"),
        "optimizer steps between two checkpoints. None: at the end of epochs only.",
    )
    every_n_epochs: int | None = setting(
        None,
        optional(count("epochs"), "1, unless every_n_train_steps is given"),
        "epochs between two checkpoints at the end of an epoch. None: 1, unless "
        "``every_n_train_steps`` is given.",
    )
    max_to_keep: int = setting(
        2,
        count("checkpoints", least=1),
        "number of newest checkpoints to keep over all restarts; only files that this run has "
        "saved are removed.",
    )
    batch_policy: BatchPolicy = setting(
        "fixed_global_batch",
        choice(*get_args(BatchPolicy)),
        'when the number of ranks changes, ``"fixed_global_batch"`` keeps the global batch. The '
        'others scale it with the number of ranks; ``"scale_lr"`` scales the learning rate too, '
        '``"scale_lr:sqrt"`` with the square root, ``"fixed_micro_batch"`` keeps it.',
    )
    seed: int | None = setting(
        None,
        optional(AllowedValues("a whole number", is_whole), "of the process"),
        "seed of the sample order; None: that of ``seed_everything``, or a random one.",
    )
    weights_only: bool = setting(
        True,
        choice(True, False),
        "read checkpoints with the restricted unpickler of ``torch.load``, and refuse a state that "
        "it cannot read, before training and at the first save. False: for folders whose writers "
        "you trust.",
    )
    preemption_check: Callable[[], bool] | None = setting(
        None,
        None,
        "called on a thread of local rank 0; returns whether the machine will be preempted.",
    )
    preemption_poll_interval: float = setting(5.0, _SECONDS, "seconds between two such calls.")
    grace_period: float = setting(
        25.0,
        _SECONDS,
        "seconds from a signal to the forced exit of the process; more than two steps and a "
        "checkpoint take, less than the launcher waits (torchrun: 30).",
    )
    hang_timeout: float | None = setting(
        600.0,
        optional(_SECONDS, "never"),
        "seconds without a batch, or without progress at the start, after which a process exits "
        "with code 76; more than the longest pause between batches. None: never.",
    )
    saving: CheckpointSettings = field(default_factory=CheckpointSettings)

    def __post_init__(self) -> None:
        check_values(self)
        if not (self.every_n_train_steps or self._epochs_between):
            raise ValueError(
                "Checkpoints are taken after steps, after epochs or both; got every_n_train_steps="
                f"{self.every_n_train_steps} and every_n_epochs={self.every_n_epochs}"
            )

    @property
    def agreed(self) -> dict[str, Any]:
        """Settings that are equal on all ranks, or they would not save together."""
        names = ("every_n_train_steps", "every_n_epochs", "batch_policy")
        return {**{name: getattr(self, name) for name in names}, "format": self.saving.format}

    def require_recoverable(self) -> None:
        """Raise a ValueError if checkpoints need ranks that may be lost in the process."""
        if self.saving.sharded:
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


@dataclass(frozen=True)
class RecoverySettings:
    """Reaction to a rank that is lost.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
        ImportError: this torch has no means for it.
    """

    recovery: RecoveryMode = setting(
        "restart",
        choice(*get_args(RecoveryMode)),
        'if a rank is lost, ``"in_process"``: the others repeat the interrupted step without it, '
        "in the same processes, and its replacement joins between two steps; on CPUs, under "
        "``lightning-dist launch``, with ``ElasticRestart`` or an ``ElasticLoop``. "
        '``"restart"``: all ranks are restarted.',
    )
    mirror_residuals: bool | int = setting(
        False,
        AllowedValues(
            "True, False or the steps between two copies",
            lambda value: type(value) is bool or (type(value) is int and value > 0),
        ),
        'with ``recovery="in_process"``, keep a copy of the residuals of each rank on the next '
        "one, which takes them over if the rank is lost; the exchange is then flat. True: copied "
        "after every step; a number: steps between two copies. A copy takes 4 bytes per "
        "compressed element, in memory and on the link, and training waits for it.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.recovery == "in_process":
            RECOVERY.require()
        elif self.mirror_residuals is not False:
            raise ValueError(
                f"mirror_residuals={self.mirror_residuals} takes effect with "
                "recovery='in_process' only, where other ranks take residuals over; leave it out: "
                "checkpoints have the residuals of all ranks"
            )

    @property
    def mirror_every(self) -> int | None:
        """Steps between two copies of residuals; None: there are none."""
        return None if self.mirror_residuals is False else int(self.mirror_residuals)
