"""Measures what codecs cost on this machine, without a network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from lightning_dist.codecs import BlockCodec, PowerSGD, resolve_codec
from lightning_dist.codecs.base import Codec
from lightning_dist.reducer.alone import WIDTH, Passes, make_passes
from lightning_dist.reducer.costs import CodecCost

CANDIDATES = ("none", "fp16", "int8", "int4", "sign", "topk", "powersgd")
_CHUNKS = 12
_ROUNDS = 3


def calibrate(
    codecs: Sequence[str] = CANDIDATES,
    *,
    fused: bool = False,
    chunks: int = _CHUNKS,
    rounds: int = _ROUNDS,
) -> dict[str, CodecCost]:
    """The cost of each of ``codecs``, by name: medians of the kernels.

    In the time of one thread: what else the machine does counts only where it takes memory's.

    Args:
        fused: compile the kernels first, as the reducer does for large models; takes seconds each.
        chunks: of a megabyte of gradient; few stay in a cache, as gradients do not.

    Raises:
        ValueError: an unknown codec, or one whose bytes depend on the values.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reducer has one
    try:
        with torch.no_grad():
            return {
                name: _cost(
                    name,
                    resolve_codec(name),
                    fused=fused,
                    chunks=chunks,
                    seconds=partial(_seconds, rounds=rounds),
                )
                for name in codecs
            }
    finally:
        torch.set_num_threads(threads)


def _cost(
    name: str,
    codec: Codec,
    *,
    fused: bool,
    chunks: int,
    seconds: Callable[[Passes], tuple[float, float]],
) -> CodecCost:
    wire, assumes = _wire(name, codec)
    can_fuse = fused and isinstance(codec, BlockCodec) and codec.fusable and not codec.lossless

    def passes(received: int | None) -> Passes:
        return make_passes(
            codec,
            feedback=codec.keeps_residual,
            fused=can_fuse,
            device=torch.device("cpu"),
            chunks=chunks,
            received=received,
        )

    linear = codec.exchange == "allreduce"
    one = passes(1)
    elements = one.numel
    encode, settle_one = seconds(one)
    decode = 0.0
    if codec.lossless and linear:
        settle_one = 0.0  # added up in the bucket itself
    if not linear:
        decode = max(seconds(passes(2))[1] - settle_one, 0.0)
    return CodecCost(
        name,
        codec.exchange,
        wire,
        encode / elements,
        min(decode, settle_one) / elements,
        max(settle_one - decode, 0.0) / elements,
        source="compiled, on this machine" if can_fuse else "not compiled, on this machine",
        assumes=assumes,
    )


def _wire(name: str, codec: Codec) -> tuple[float, str]:
    if isinstance(codec, PowerSGD):
        bytes_ = codec.wire_bytes((WIDTH, WIDTH), step=0)
        return bytes_ / WIDTH**2, f"matrices of {WIDTH} x {WIDTH}; a profile does not say"
    if not isinstance(codec, BlockCodec):
        raise ValueError(
            f"codec must have a size that does not depend on the gradient, got {name!r}; leave it "
            f"out, or use one of {', '.join(CANDIDATES)}"
        )
    elements = codec.block << 10
    return codec.wire_bytes(elements) / elements, ""


def _seconds(passes: Passes, *, rounds: int) -> tuple[float, float]:
    """Of encode and of settle."""
    encode, settle = [], []
    for _ in range(1 + rounds):  # the first touches the memory
        passes.prepare()
        times = [time.thread_time()]
        for call in (passes.encode, passes.settle):
            call()
            times.append(time.thread_time())
        encode.append(times[1] - times[0])
        settle.append(times[2] - times[1])
    return statistics.median(encode[1:]), statistics.median(settle[1:])
