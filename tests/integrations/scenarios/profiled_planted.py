"""Runs whose times, losses and bits are known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from profiled_common import STEPS, busy, ddp, digest, quiet_profiler, tell, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import CommProfiler, compress_ddp
from lightning_dist.codecs import Int8
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.reducer.units.block import BlockUnit


def noted(
    call: Callable[..., Any], before: list[int], launched: list[tuple[int, int]]
) -> Callable[..., Any]:
    """``call``, which notes when it is called for gradients; of a group or torch.distributed.

    And when the profiler was asked ``before``: what it records is between the two.
    """

    def noting(*given: Any, **named: Any) -> Any:
        if isinstance(given[0], dist.ProcessGroup):
            _, (tensor,), options = given
            is_async = options.asyncOp
        else:
            tensor, is_async = given[0], named.get("async_op")
        if tensor.numel() > 1000 and is_async:
            launched.append((before[-1], time.monotonic_ns()))
        return call(*given, **named)

    return noting


def timed(call: Callable[..., Any], planted: float, spent: list[float]) -> Callable[..., Any]:
    """``call``, which takes so many seconds longer and notes how long it took."""

    def timing(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        busy(planted)
        found = call(*given, **named)
        spent.append(time.perf_counter() - begin)
        return found

    return timing


def skew(folder: Path, *, codec: str | None) -> None:
    """One collective in each step, whose launch is seen here too."""
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    if codec is not None:
        compress_ddp(model, codec, compile_kernels=False)
    late = {4: 0.05, 6: 0.1, 8: 0.1} if dist.get_rank() == 1 else {}
    before, launched = list[int](), list[tuple[int, int]]()
    launches = Recorder.launches

    def asked(*given: Any, **named: Any) -> Any:
        before.append(time.monotonic_ns())
        return launches(*given, **named)

    Recorder.launches = asked
    for owner, name in ((dist.ProcessGroup, "allreduce"), (dist, "all_gather_single")):
        setattr(owner, name, noted(vars(owner)[name], before, launched))
    # Links would be measured with the functions that are watched.
    with quiet_profiler(model, dirpath=folder, measure_links=False):
        train(model, late=lambda step: late.get(step, 0.0))
    tell(folder, launched=launched)


def codec_time(folder: Path) -> None:
    """The encoding of the one bucket takes longer; what comes before the exchange is timed here."""
    spent: list[float] = []
    for name, planted in (("encode", 0.01), ("finite", 0.0), ("start", 0.0)):
        setattr(BlockUnit, name, timed(getattr(BlockUnit, name), planted, spent))
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    compress_ddp(model, "int8", compile_kernels=False)
    with quiet_profiler(model, dirpath=folder):
        train(model)
    calls = len(spent) // STEPS
    tell(
        folder,
        encode_ns=[int(1e9 * sum(spent[at : at + calls])) for at in range(0, len(spent), calls)],
    )


def same_bits(folder: Path) -> None:
    found = {}
    for codec in (None, "int8"):
        for profiled in (False, True):
            model = ddp()
            if codec is not None:
                compress_ddp(model, codec, compile_kernels=False)
            if profiled:
                with quiet_profiler(model, dirpath=folder, error_every_n_steps=1):
                    train(model)
            else:
                train(model)
            found[f"{codec} {profiled}"] = digest(model)
    tell(folder, **found)


@dataclass(frozen=True)
class Losing(Int8):
    """Says the opposite of a fifth of what it is given: a residual grows by that in each step."""

    def decode(self, payload: Any, dtype: torch.dtype, keys: Any = None) -> torch.Tensor:
        return -0.2 * super().decode(payload, dtype, keys)


def residual(folder: Path, codec: str | Int8) -> None:
    """One bucket, so that it is looked at often."""
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    compress_ddp(model, codec, error_feedback=True, compile_kernels=False)
    with CommProfiler(model, dirpath=folder, error_every_n_steps=1, html=False):
        train(model, steps=150)
    tell(folder)


def accumulation(folder: Path) -> None:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with quiet_profiler(model, dirpath=folder):
        for _ in range(6):
            with model.no_sync():
                model(torch.ones(2, 256)).sum().backward()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 256))
                busy(0.05)
                model(torch.ones(2, 256))
    tell(folder)


CASES: dict[str, Callable[[Path], None]] = {
    "skew ddp": lambda folder: skew(folder, codec=None),
    "skew int8": lambda folder: skew(folder, codec="int8"),
    "codec time": codec_time,
    "same bits": same_bits,
    "residual healthy": lambda folder: residual(folder, "topk:ratio=0.05"),
    "residual growing": lambda folder: residual(folder, Losing()),
    "accumulation": accumulation,
}
