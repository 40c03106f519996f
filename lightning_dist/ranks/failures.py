"""Errors of collectives, which say that another rank is lost, told from all others."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist

_COLLECTIVES = (
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed._functional_collectives", "torch.distributed.nn.functional"),
    *("torch.distributed.utils", "torch.nn.parallel.distributed"),
    *("torch.distributed.fsdp._fully_shard._fsdp_collectives",),
    *("torch.distributed.fsdp._fully_shard._fsdp_param_group",),
)
"""Modules of torch in which a collective raises its error, or a wait for one."""


class CollectiveError(RuntimeError):
    """A collective of this package failed: another rank is lost, or does not answer."""


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective raised ``error``: another rank may have failed before this one.

    By the class of the error, or by where it was raised. Never by its text, which may be anybody's.
    """
    if isinstance(error, CollectiveError | dist.DistError):
        return True
    # One that is derived from it, such as OutOfMemoryError, says something else.
    return type(error) is RuntimeError and _raised_in(error.__traceback__) in _COLLECTIVES


def is_of_loader(error: BaseException) -> bool:
    """Whether a loader raised ``error`` because a worker of it has ended."""
    is_torchs = _raised_in(error.__traceback__).startswith("torch.utils.data.")
    return type(error) is RuntimeError and is_torchs


def _raised_in(traceback: TracebackType | None) -> str:
    """Name of the module that has raised an error."""
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return str(traceback.tb_frame.f_globals.get("__name__", ""))
