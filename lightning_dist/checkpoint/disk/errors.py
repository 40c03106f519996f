"""Errors of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class DroppedCheckpointError(CheckpointError):
    """A snapshot was given up before it was written; nothing is wrong with the disk."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or its bytes are not those that were written.

    Attributes:
        path: of the checkpoint.
        reason: what was found, and where.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is not a complete checkpoint: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpointError], tuple[str, str]]:
        return type(self), (self.path, self.reason)


def no_checkpoint(path: str) -> FileNotFoundError:
    """The error where nothing is at ``path``."""
    return FileNotFoundError(
        f"There is no checkpoint at {path}; lightning-dist ckpt ls DIR lists those of a folder"
    )
