"""Errors of one rank, in words that another can raise them from; not all can be pickled."""

from __future__ import annotations

from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError

_TYPES = {kind.__name__: kind for kind in (ValueError, FileNotFoundError, OSError)}
"""A class before those that it is derived from."""


def told(error: Exception) -> list[str]:
    """``error`` for other ranks; JSON-able."""
    if isinstance(error, CorruptCheckpointError):
        return ["CorruptCheckpointError", error.path, error.reason]
    kinds = [name for name, kind in _TYPES.items() if isinstance(error, kind)]
    return [kinds[0] if kinds else "", str(error) or repr(error)]


def retold(words: list[str]) -> Exception:
    """The error that was :func:`told`; a CheckpointError where its type is not known."""
    kind, *arguments = words
    if kind == "CorruptCheckpointError":
        return CorruptCheckpointError(*arguments)
    return _TYPES.get(kind, CheckpointError)(*arguments)
