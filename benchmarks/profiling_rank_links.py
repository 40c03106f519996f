"""Steps that are nearly all transfer, and clocks that are compared while a link is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.profiling_rank_planted import compressed, every_step
from lightning_dist.profiling.clocks import read_offset

_WIDTH = 1024
_LAYERS = 4
_BULK = 1 << 20
"""Bytes that one message of the load has."""
_PATIENCE_S = 60.0


def wire(folder: Path, *, codec: str, steps: int) -> None:
    """17 MB of gradients of one sample."""
    module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    model = compressed(DistributedDataParallel(module, bucket_cap_mb=8), codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with every_step(model, folder):
        for _ in range(steps):
            model(torch.ones(1, _WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def clocks(folder: Path, *, load: str, readings: int) -> list[tuple[int, int]]:
    """Offset and uncertainty of each reading, in nanoseconds, as if ranks had clocks of their own.

    load: ``"idle"``; ``"both ways"``: allreduces beside; ``"one way"``: rank 0 sends.
    """
    group, bulk = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    found = []
    with _loaded(load, bulk):
        for _ in range(readings):
            reading = read_offset(group, machine=str(dist.get_rank()))
            found.append((reading.offset, reading.uncertainty))
        dist.barrier(group)
    return found


@contextmanager
def _loaded(load: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Until the block is left something travels, message after message."""
    if load == "idle":
        yield
        return
    done, travels = threading.Event(), threading.Event()
    payload = torch.zeros(_BULK // 4)
    rank = dist.get_rank()

    def travel() -> None:
        while payload[0] == 0:
            payload[0] = done.is_set()  # goes to the others with the message: all stop at once
            if load == "both ways":
                dist.all_reduce(payload, group=group)
            elif rank == 0:
                dist.send(payload, dst=1, group=group)
            else:
                dist.recv(payload, src=0, group=group)
            travels.set()

    thread = threading.Thread(target=travel, daemon=True)
    thread.start()
    if not travels.wait(_PATIENCE_S):
        raise TimeoutError("nothing travels")
    yield
    done.set()
    thread.join(_PATIENCE_S)
