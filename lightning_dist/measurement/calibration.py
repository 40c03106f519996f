"""Costs of codecs on this machine, measured without a network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.codecs import resolve_codec
from lightning_dist.codecs.base import Codec
from lightning_dist.measurement import CANDIDATES, CodecCost
from lightning_dist.measurement.microbenchmark import (
    WIDTH,
    CodecWork,
    DeviceClock,
    HostClock,
    StreamClock,
    clock_of,
)

_UNITS = 12
_UNITS_OF_ACCELERATORS = 32
"""Units are of a megabyte of gradient; caches of accelerators are larger."""
_ROUNDS = 3
_AHEAD = 40_000_000
"""Cycles of a GPU, 20 ms or more: the host has then launched a pass before the GPU begins it, as in
training. Otherwise the time of a pass would be that of launching its kernels."""


def calibrate(
    codecs: Sequence[str] = CANDIDATES,
    *,
    fused: bool = False,
    units: int | None = None,
    rounds: int = _ROUNDS,
    where: str = "on this machine now",
    device: torch.device | str = "cpu",
) -> dict[str, CodecCost]:
    """Cost of each of ``codecs``, by name: medians of the passes that training runs.

    On a CPU in the CPU time of one thread, which other work on the machine changes little. On a GPU
    in the time of the caller's stream, where nothing else should run.

    Args:
        fused: use the kernels of large models: compiled ones on a CPU, which takes seconds for each
            codec, Triton's on a GPU.
        units: of a megabyte of gradient; a few would stay in a cache. None: enough.
        where: of ``CodecCost.source``.
        device: where gradients are compressed, a CPU or an accelerator.

    Raises:
        ValueError: an unknown codec, or one whose bytes depend on the values.
    """
    resolved = {name: _of_matrices(name) for name in codecs}
    for name, codec in resolved.items():
        _wire(name, codec)  # refuses before the others are measured
    device = torch.device(device)
    if units is None:
        units = _UNITS_OF_ACCELERATORS if is_accelerator(device) else _UNITS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reducer has one
    try:
        # Some passes draw from the generator that a training may go on with.
        devices = [] if device.type == "cpu" else [device]
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            is_cpu = device.type == "cpu"
            clock = HostClock(time.thread_time_ns) if is_cpu else clock_of(device)
            return {
                name: _cost(
                    name,
                    codec,
                    fused=fused,
                    device=device,
                    units=units,
                    where=where,
                    seconds=partial(_seconds, rounds=rounds, clock=clock),
                )
                for name, codec in resolved.items()
            }
    finally:
        torch.set_num_threads(threads)


def has_a_cost(codec: str) -> bool:
    """True if :func:`calibrate` accepts ``codec``, a name or a name with options."""
    try:
        _wire(codec, _of_matrices(codec))
    except ValueError:
        return False
    return True


def to_measure(names: Sequence[str], own: str) -> list[str]:
    """``names`` and the others that a prediction needs: ``none``, and the codec of the run.

    Args:
        own: codec of the run; left out where :func:`has_a_cost` is False, as for a codec of another
            version.
    """
    codecs = dict.fromkeys(["none", own, *names])
    if own not in names and not has_a_cost(own):
        del codecs[own]
    return list(codecs)


def _cost(
    name: str,
    codec: Codec,
    *,
    fused: bool,
    device: torch.device,
    units: int,
    where: str,
    seconds: Callable[[CodecWork], tuple[float, float]],
) -> CodecCost:
    wire, assumption = _wire(name, codec)
    can_fuse = fused and codec.fusable and not codec.lossless

    def passes(ranks: Literal[1, 2]) -> CodecWork:
        return CodecWork(
            codec,
            feedback=codec.keeps_residual,
            fused=can_fuse,
            device=device,
            units=units,
            ranks=ranks,
        )

    linear = EXCHANGES[codec.exchange].linear
    work = passes(2 if linear else 1)
    elements = work.numel
    encode, decode_one = seconds(work)
    decode = 0.0
    if codec.lossless and linear:
        decode_one = 0.0  # added up in the bucket itself
    if not linear:
        decode = max(seconds(passes(2))[1] - decode_one, 0.0)
    return CodecCost(
        name,
        codec.exchange,
        wire,
        encode / elements,
        min(decode, decode_one) / elements,
        max(decode_one - decode, 0.0) / elements,
        source=f"measured alone {where}, {'' if work.is_fused else 'not '}compiled",
        assumption=assumption,
        compiled=work.is_fused,
    )


def _of_matrices(name: str) -> Codec:
    """Codec of large matrices, in its last stage."""
    codec = resolve_codec(name)
    return codec.for_tensor("", (WIDTH, WIDTH), step=codec.boundaries()[-1])


def _wire(name: str, codec: Codec) -> tuple[float, str]:
    nbytes = codec.payload_bytes((WIDTH, WIDTH))
    if nbytes is None:
        raise ValueError(
            f"codec must have a size that does not depend on the gradient, got {name!r}; leave it "
            f"out, or use one of {', '.join(CANDIDATES)}"
        )
    matrices = f"matrices of {WIDTH} x {WIDTH}; a profile has no shapes"
    return nbytes / WIDTH**2, matrices if codec.whole_tensors else ""


def _seconds(passes: CodecWork, *, rounds: int, clock: DeviceClock) -> tuple[float, float]:
    """Seconds of encode and of decode."""
    encode, decoded = [], []
    for _ in range(1 + rounds):  # the first touches the memory
        # Some codecs do one thing in even steps and another in odd ones.
        times = [_once(passes, clock) for _ in range(2)]
        encode.append(sum(seconds for seconds, _ in times) / 2)
        decoded.append(sum(seconds for _, seconds in times) / 2)
    return statistics.median(encode[1:]), statistics.median(decoded[1:])


def _once(passes: CodecWork, clock: DeviceClock) -> tuple[float, float]:
    passes.prepare()
    if isinstance(clock, StreamClock):
        clock.hold(_AHEAD)
    clock.compare()  # near events have the most exact times
    marks = [clock.now()]
    for call in (passes.encode, passes.exchange, passes.decode):
        call()
        marks.append(clock.now())
    while not clock.are_past(marks):
        pass
    begin, encoded, received, finished = clock.read(marks, since=marks[0])
    return (encoded - begin) / 1e9, (finished - received) / 1e9
