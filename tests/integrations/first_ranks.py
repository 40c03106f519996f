"""A smaller world inside a test that runs on ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from rank_loop import meet


@contextmanager
def first_ranks(size: int, folder: Path) -> Iterator[bool]:
    """A world of the first ranks; whether this is one. The others wait for it.

    Args:
        folder: one for all ranks; once for each.
    """
    rank, everybody = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(str(folder / "first_ranks"), everybody)
    dist.barrier()
    dist.destroy_process_group()
    try:
        if rank >= size:
            yield False
        else:
            with patch.dict(os.environ, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)):
                meet(dist.PrefixStore("first", store), rank, size)
                try:
                    yield True
                finally:
                    dist.destroy_process_group()
    finally:
        of_all = dist.PrefixStore("all", store)
        meet(of_all, rank, everybody, timeout=timedelta(seconds=100))
