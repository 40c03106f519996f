"""What is planted in a training, and what the ranks themselves see of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp
from lightning_dist.integrations.profile_run import ProfileRun
from lightning_dist.profiling.capture.session import SessionSettings
from lightning_dist.reducer.block_chunk import BlockChunk

FIRST = 4
"""Steps before the first one in which a rank is late."""
_WIDTH = 256


@contextmanager
def every_step(model: DistributedDataParallel, folder: Path) -> Iterator[None]:
    """A profile with all steps in detail."""
    run = ProfileRun(model, parent=folder, settings=SessionSettings(budget=1))
    yield
    run.close("finished", together=True)


def busy(seconds: float) -> None:
    """What a slow rank does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def compressed(model: DistributedDataParallel, codec: str) -> DistributedDataParallel:
    """``model`` with the codec; ``"ddp"``: as it is. Kernels stay eager: nothing is compiled
    while something is measured."""
    if codec != "ddp":
        compress_ddp(model, codec, compile_kernels=False)
    return model


def skew(folder: Path, *, codec: str, late_ms: Sequence[float]) -> list[int]:
    """When the collective of each step was launched here; rank 1 is late, step after step."""
    module = nn.Linear(_WIDTH, _WIDTH, bias=False)
    model = compressed(DistributedDataParallel(module), codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    launched: list[int] = []
    # Noted within the profile: it measures the links first, with the same functions.
    with every_step(model, folder), _noted(launched):
        for late in (*[0.0] * FIRST, *late_ms):
            loss = model(torch.randn(8, _WIDTH)).square().mean()
            if dist.get_rank() == 1:
                busy(late / 1000)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return launched


def codec_time(folder: Path, *, planted_ms: float, steps: int) -> list[float]:
    """Milliseconds from the encoding to the launch in each step, every encoding made longer."""
    module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
    model = compressed(DistributedDataParallel(module, bucket_cap_mb=0.3), "int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spent: list[float] = []
    of_steps = []
    with _timed({"encode": planted_ms, "finite": 0, "issue": 0}, spent), every_step(model, folder):
        for _ in range(steps):
            model(torch.randn(8, _WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            of_steps.append(1000 * sum(spent))
            spent.clear()
    return of_steps


@contextmanager
def _noted(launched: list[int]) -> Iterator[None]:
    """Note when collectives of gradients are launched: an allreduce of the group, or a gather."""

    def noting(call: Callable[..., Any], *, launches: Callable[..., bool]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            if launches(*given, **named):
                launched.append(time.monotonic_ns())
            return call(*given, **named)

        return noted

    def allreduce(group: Any, tensors: Sequence[Tensor], options: Any) -> bool:
        return bool(options.asyncOp) and tensors[0].numel() > 1000

    def gather(gathered: Tensor, *given: Any, async_op: bool = False, **named: Any) -> bool:
        return async_op and gathered.numel() > 1000

    watched = ((dist.ProcessGroup, "allreduce", allreduce), (dist, "all_gather_single", gather))
    # getattr would bind the method of the extension class.
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in watched]
    for owner, name, launches in watched:
        setattr(owner, name, noting(vars(owner)[name], launches=launches))
    yield
    for owner, name, call in originals:
        setattr(owner, name, call)


@contextmanager
def _timed(planted_ms: dict[str, float], spent: list[float]) -> Iterator[None]:
    """Make these methods of a chunk longer, and note how long they take."""

    def timing(call: Callable[..., Any], longer: float) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            busy(longer)
            found = call(*given, **named)
            spent.append(time.perf_counter() - begin)
            return found

        return timed

    originals = {name: getattr(BlockChunk, name) for name in planted_ms}
    for name, call in originals.items():
        setattr(BlockChunk, name, timing(call, planted_ms[name] / 1000))
    yield
    for name, call in originals.items():
        setattr(BlockChunk, name, call)
