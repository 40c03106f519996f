"""Measures what codecs cost on this machine, without a network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from lightning_dist.accelerator import is_accelerator
from lightning_dist.codecs import resolve_codec
from lightning_dist.codecs.base import Codec
from lightning_dist.measurement.costs import CANDIDATES, CodecCost
from lightning_dist.measurement.device_clock import DeviceClock, HostClock, StreamClock, clock_of
from lightning_dist.measurement.microbenchmark import WIDTH, Passes, make_passes

_UNITS = 12
_UNITS_OF_ACCELERATORS = 32
"""Their caches hold more. Of a megabyte of gradient each."""
_ROUNDS = 3
_AHEAD = 40_000_000
"""Cycles of a GPU, 20 ms or more: as in a training the host has asked for all of a pass before the
GPU comes to it. Otherwise its time is that of launching kernels."""


def calibrate(
    codecs: Sequence[str] = CANDIDATES,
    *,
    fused: bool = False,
    units: int | None = None,
    rounds: int = _ROUNDS,
    where: str = "on this machine",
    device: torch.device | str = "cpu",
) -> dict[str, CodecCost]:
    """The cost of each of ``codecs``, by name: medians of the kernels.

    On a CPU in the time of one thread: what else the machine does counts only where it takes
    memory's. On a GPU in the time of the stream of the caller, where nothing else should run.

    Args:
        fused: compile the kernels first, as the reducer does for large models; takes seconds each.
        units: of a megabyte of gradient; few stay in a cache, as gradients do not. None: enough.
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
        own = [] if device.type == "cpu" else [device]
        with torch.no_grad(), torch.random.fork_rng(devices=own):
            clock = _clock_of_work(device)
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
    """Whether :func:`calibrate` takes ``codec``, a name or a name with options."""
    try:
        _wire(codec, _of_matrices(codec))
    except ValueError:
        return False
    return True


def to_measure(names: Sequence[str], own: str) -> list[str]:
    """``names``, with what a prediction needs beside them: a copy, and the codec of the run.

    Args:
        own: of the run; left out where nothing can be said of it: bytes that depend on the values,
            or a codec of another version.
    """
    found = dict.fromkeys(["none", own, *names])
    if own not in names and not has_a_cost(own):
        del found[own]
    return list(found)


def _cost(
    name: str,
    codec: Codec,
    *,
    fused: bool,
    device: torch.device,
    units: int,
    where: str,
    seconds: Callable[[Passes], tuple[float, float]],
) -> CodecCost:
    wire, assumption = _wire(name, codec)
    can_fuse = fused and codec.fusable and not codec.lossless

    def passes(received: int | None) -> Passes:
        return make_passes(
            codec,
            feedback=codec.keeps_residual,
            fused=can_fuse,
            device=device,
            units=units,
            received=received,
        )

    linear = codec.exchange == "allreduce"
    one = passes(1)
    elements = one.numel
    encode, decode_one = seconds(one)
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
        source=f"{'' if one.is_fused else 'not '}compiled, {where}",
        assumption=assumption,
        compiled=one.is_fused,
    )


def _of_matrices(name: str) -> Codec:
    """The codec of large matrices, in its last stage."""
    codec = resolve_codec(name)
    return codec.for_tensor("", (WIDTH, WIDTH), step=codec.boundaries()[-1])


def _wire(name: str, codec: Codec) -> tuple[float, str]:
    nbytes = codec.payload_bytes((WIDTH, WIDTH))
    if nbytes is None:
        raise ValueError(
            f"codec must have a size that does not depend on the gradient, got {name!r}; leave it "
            f"out, or use one of {', '.join(CANDIDATES)}"
        )
    matrices = f"matrices of {WIDTH} x {WIDTH}; a profile does not say"
    return nbytes / WIDTH**2, matrices if codec.whole_tensors else ""


def _clock_of_work(device: torch.device) -> DeviceClock:
    return HostClock(time.thread_time_ns) if device.type == "cpu" else clock_of(device)


def _seconds(passes: Passes, *, rounds: int, clock: DeviceClock) -> tuple[float, float]:
    """Of encode and of decode."""
    encode, decoded = [], []
    for _ in range(1 + rounds):  # the first touches the memory
        # Some codecs do one thing in even steps and another in odd ones.
        times = [_once(passes, clock) for _ in range(2)]
        encode.append(sum(each for each, _ in times) / 2)
        decoded.append(sum(each for _, each in times) / 2)
    return statistics.median(encode[1:]), statistics.median(decoded[1:])


def _once(passes: Passes, clock: DeviceClock) -> tuple[float, float]:
    passes.prepare()
    if isinstance(clock, StreamClock):
        clock.hold(_AHEAD)
    clock.compare()  # what events tell is the more exact the nearer they are
    marks = [clock.now()]
    for call in (passes.encode, passes.decode):
        call()
        marks.append(clock.now())
    while not clock.are_past(marks):
        pass  # as a benchmark does; nothing else is to do
    begin, encoded, finished = clock.read(marks, since=marks[0])
    return (encoded - begin) / 1e9, (finished - encoded) / 1e9
