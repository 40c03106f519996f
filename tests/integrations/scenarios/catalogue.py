"""Where a scenario enters its name, and the world that every scenario starts in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_dist.private import forget_group_numbers

Facts = dict[str, Any]
"""Tensors and plain values: it goes to the test through a file."""

SCENARIOS: dict[str, Callable[[], Facts]] = {}
TIMEOUT = timedelta(seconds=30)


def scenario(function: Callable[[], Facts]) -> Callable[[], Facts]:
    """Add a function to the scenarios of its world."""
    SCENARIOS[function.__name__] = function
    return function


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 2))  # launchers other than torchrun: always two


def folder() -> Path:
    """The same folder on all ranks, kept until the tests end."""
    return Path(os.environ["SCENARIO_FOLDER"])


def meet(store: dist.Store, rank: int, size: int, *, timeout: timedelta = TIMEOUT) -> None:
    """Make the default group, and wait until all of its ranks have it."""
    forget_group_numbers()  # of one that could not be made: the store has the number in its keys
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    # Each pair is connected by its two ends on their own: who gives the group up at once closes
    # what another rank is still waiting for, and that one fails.
    dist.barrier()


@contextmanager
def process_group(store: dist.Store, rank: int, size: int) -> Iterator[None]:
    """A default group of its own, so that one scenario cannot leave another out of step."""
    meet(store, rank, size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """A world of one rank inside a scenario, as if torchrun had started a single process."""
    before = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.destroy_process_group()
    try:
        with process_group(dist.HashStore(), 0, 1):
            yield
    finally:
        os.environ.update(before)
        # The one that the runner will destroy.
        meet(dist.HashStore(), 0, 1)


@contextmanager
def first_ranks(size: int) -> Iterator[bool]:
    """A world of the first ranks inside a scenario; whether this is one. The others wait for it."""
    store = dist.FileStore(str(folder() / "first_ranks"), world_size())
    before = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    dist.barrier()
    dist.destroy_process_group()
    try:
        if rank() >= size:
            yield False
        else:
            os.environ.update(dict.fromkeys(before, str(size)))
            with process_group(dist.PrefixStore("first", store), rank(), size):
                yield True
    finally:
        os.environ.update(before)
        everybody = dist.PrefixStore("all", store)
        meet(everybody, rank(), world_size(), timeout=timedelta(seconds=100))
