"""Settings of checkpoints that are written in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_dist.settings.declared import (
    Rule,
    check_values,
    choice,
    count,
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
        Rule(
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
        Rule(
            "'auto', 'blocking' or 'sync', for accelerate writes its files at once",
            lambda value: value in ("auto", "blocking", "sync"),
        ),
        '``"blocking"`` (also ``"auto"``): ``save_state`` returns when the files are in memory. '
        '``"sync"``: when they are durable.',
    )
