"""The default process group of a rank that a launcher may have started before."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_dist.elastic.launch import Launch
from lightning_dist.elastic.store import attempt_store


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None) -> None:
    """``torch.distributed.init_process_group``, over a store of this start's own.

    torchrun's ranks share a store over all restarts, in which restarted ones find the addresses of
    the dead. For a loop of your own; call it before ``Accelerator()``, which takes the group that
    is there. Strategies of this package do it by themselves. Without torchrun nothing is different.

    Args:
        backend: as of torch; None: torch's choice.
        timeout: for the ranks to meet, and of every collective; None: torch's default.

    Raises:
        TimeoutError: ranks did not come in time; rank 0 names them.
    """
    launch = Launch.from_env()
    if not launch.is_elastic:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = attempt_store(launch, timeout=timeout or default_pg_timeout)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
