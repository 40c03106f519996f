"""Compile the kernels at set-up: never inside the first backward pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from lightning_dist.codecs.base import Codec, Payload
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.reducer.kernels import Kernels, compute_dtype
from lightning_dist.reducer.plan import Network, Planner
from lightning_dist.settings import Settings

log = logging.getLogger(__name__)

_BLOCKS = 96  # any number will do: compiled kernels take all


def compile_kernels(
    planner: Planner, settings: Settings, dtypes: Iterable[torch.dtype], *, say: bool
) -> None:
    """Compile all passes of the codec for gradients of ``dtypes``; falls back to eager, saying so."""
    kernels = planner.kernels(settings.codec)
    start = time.perf_counter()
    if say:
        log.warning("compiling the %s kernels (about 20 s the first time)", settings.codec.name)
    try:
        for dtype in dtypes:
            _compile(kernels, planner, settings, dtype)
    except Exception as error:  # a broken tool chain must not stop a training run
        log.warning("torch.compile failed, the kernels stay eager (same bytes, slower): %s", error)
        return
    if say:
        log.warning("compiled in %.1f s", time.perf_counter() - start)


def _compile(kernels: Kernels, planner: Planner, settings: Settings, dtype: torch.dtype) -> None:
    codec, net = settings.codec, planner.network
    rows = planner.rows(codec)
    compute = compute_dtype(dtype)

    def payload(of: int, count: int = _BLOCKS) -> Payload:
        return _payload(codec, dtype, of, count, net)

    def example() -> dict[str, tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(0)
        shape = (rows, 2 * _BLOCKS, codec.block)
        # Strided like a piece of a larger parameter.
        grad = torch.randn(shape, generator=generator).to(net.device, dtype)[:, :_BLOCKS]
        residual = torch.zeros(shape, dtype=compute, device=net.device)[:, :_BLOCKS]
        kept = residual if settings.error_feedback else None
        scale, ok = torch.ones((), device=net.device), torch.ones((), device=net.device).bool()
        own, received = payload(rows), [payload(rows)]
        if rows == 1 and codec.exchange == "two_shot":
            received = [payload(1) for _ in range(net.world_size)]
        passes: dict[str, tuple[Any, ...]] = {
            "encode": (grad, kept, scale, own),
            "settle": (grad, kept, scale, ok, own, tuple(received)),
        }
        if rows > 1:
            shards, mean = payload(net.world_size), payload(1)
            passes["reduce"] = (shards, mean)
            if kept is not None:
                passes["carry"] = (kept[:1], scale, ok, shards, mean)
        return passes

    kernels.compile(example)


def _payload(codec: Codec, dtype: torch.dtype, rows: int, blocks: int, network: Network) -> Payload:
    planes = codec.planes(dtype)
    buffer = torch.zeros(
        rows, row_bytes(planes, 2 * blocks), dtype=torch.uint8, device=network.device
    )
    return tuple(plane[:, :blocks] for plane in views(buffer, planes, 2 * blocks))
