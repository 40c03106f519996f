"""Errors of collectives, which say that another rank is lost, told from all others."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist

_COLLECTIVES = (
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed._functional_collectives", "torch.distributed.nn.functional"),
    "torch.distributed.utils",
)
"""Modules of torch in which a collective raises its error."""


class CollectiveError(RuntimeError):
    """A collective of this package failed: another rank is lost, or does not answer."""


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective raised ``error``: another rank may have failed before this one.

    By the class of the error, or by where it was raised. Never by its text, which may be anybody's.
    """
    if isinstance(error, CollectiveError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _raised_in(error.__traceback__) in _COLLECTIVES


def _raised_in(traceback: TracebackType | None) -> str:
    """Name of the module that has raised an error."""
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return str(traceback.tb_frame.f_globals.get("__name__", ""))
