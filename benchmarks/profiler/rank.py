"""One rank of benchmarks/profiler: what it does in each kind of case, and knows of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp
from lightning_dist.profiling.capture.profile_session import ProfileSessionSettings
from lightning_dist.profiling.links import read_offset
from lightning_dist.profiling.session.profile_run import ProfileRun
from lightning_dist.reducer.units.block import BlockUnit


class Training:
    """Layers whose gradients are ``buckets`` buckets, as many in each.

    Args:
        codec: ``"ddp"``: DDP as it is. Kernels stay eager: nothing is compiled while something is
            measured.
    """

    def __init__(
        self, codec: str, *, layers: int, width: int, buckets: int, bias: bool = True
    ) -> None:
        torch.manual_seed(0)
        self._width = width
        module = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers)))
        # A bucket is closed by the parameter that reaches the cap: weights do, biases are small.
        cap = (width + bias) * width * 4 / 2**20 * layers / buckets * 0.98
        self.model = DistributedDataParallel(module, bucket_cap_mb=cap)
        if codec != "ddp":
            compress_ddp(self.model, codec, compile_kernels=False)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, inputs: Tensor, *, late_s: float = 0.0) -> None:
        """One step, with a busy pause before the backward pass."""
        loss = self.model(inputs).square().mean()
        _busy(late_s)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def block(self, steps: int, batch: int) -> tuple[float, float]:
        """Wall and CPU milliseconds of a step."""
        inputs = torch.ones(batch, self._width)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step(inputs)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return 1000 * wall / steps, 1000 * cpu / steps

    @contextmanager
    def every_step(self, folder: Path) -> Iterator[None]:
        """A profile with all steps in detail."""
        run = ProfileRun(self.model, parent=folder, settings=ProfileSessionSettings(max_overhead=1))
        yield
        run.close("finished", together=True)


def _busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


FIRST = 4
"""Steps before the first one in which a rank is late."""


def skew(folder: Path, *, codec: str, late_ms: Sequence[float]) -> list[int]:
    """When the collective of each step was launched here; rank 1 is late, step after step."""
    training = Training(codec, layers=1, width=256, buckets=1, bias=False)
    inputs = torch.ones(8, 256)
    launched: list[int] = []

    def noting(owner: Any, name: str, launches: Callable[..., bool]) -> AbstractContextManager[Any]:
        call = vars(owner)[name]  # getattr would bind the method of the extension class

        def noted(*given: Any, **named: Any) -> Any:
            if launches(*given, **named):
                launched.append(time.monotonic_ns())
            return call(*given, **named)

        return mock.patch.object(owner, name, noted)

    def allreduce(group: Any, tensors: Sequence[Tensor], options: Any) -> bool:
        return bool(options.asyncOp) and tensors[0].numel() > 1000

    def gather(gathered: Tensor, *given: Any, async_op: bool = False, **named: Any) -> bool:
        return async_op and gathered.numel() > 1000

    # Noted within the profile: it measures the links first, with the same functions.
    with (
        training.every_step(folder),
        noting(dist.ProcessGroup, "allreduce", allreduce),
        noting(dist, "all_gather_single", gather),
    ):
        for late in (*[0.0] * FIRST, *late_ms):
            training.step(inputs, late_s=late / 1000 if dist.get_rank() == 1 else 0.0)
    return launched


def codec(folder: Path, *, planted_ms: float, steps: int) -> list[float]:
    """Milliseconds from the encoding to the launch in each step, every encoding made longer."""
    training = Training("int8", layers=4, width=256, buckets=4, bias=False)
    inputs = torch.ones(8, 256)
    spent: list[float] = []
    of_steps = []

    def timing(name: str, longer_s: float = 0.0) -> AbstractContextManager[Any]:
        call = getattr(BlockUnit, name)

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            _busy(longer_s)
            found = call(*given, **named)
            spent.append(time.perf_counter() - begin)
            return found

        return mock.patch.object(BlockUnit, name, timed)

    with (
        timing("encode", planted_ms / 1000),
        timing("finite"),
        timing("start"),
        training.every_step(folder),
    ):
        for _ in range(steps):
            training.step(inputs)
            of_steps.append(1000 * sum(spent))
            spent.clear()
    return of_steps


def wire(folder: Path, *, codec: str, steps: int) -> None:
    """17 MB of gradients of one sample: steps that are nearly all transfer."""
    training = Training(codec, layers=4, width=1024, buckets=2)
    with training.every_step(folder):
        for _ in range(steps):
            training.step(torch.ones(1, 1024))


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


_BULK = 1 << 20
"""Bytes that one message of the load has."""
_PATIENCE_S = 60.0


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


_LEAST_STEPS = 3
_BLOCK_MS = 1000
_SETTLE = 48
"""Steps in which the profiler finds out how many it may look at. They do not count."""


def cost(folder: Path, *, codec: str, buckets: int, step_ms: float, rounds: int) -> dict[str, Any]:
    """Wall and CPU milliseconds of a step, a pair for every block, by whether it was profiled."""
    bare, profiled = (Training(codec, layers=40, width=128, buckets=buckets) for _ in range(2))
    batch, estimate_ms = batch_of(bare, step_ms)
    run = ProfileRun(
        profiled.model, parent=folder, settings=ProfileSessionSettings(max_overhead=0.01)
    )
    for training in (bare, profiled):
        training.block(_SETTLE, batch)
    steps = max(_LEAST_STEPS, round(_BLOCK_MS / estimate_ms))
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for number in range(rounds):
        turn = [("without", bare), ("with", profiled)]
        for name, training in turn if number % 2 else reversed(turn):
            run.exclude_interval()
            dist.barrier()
            found[name].append(training.block(steps, batch))
    run.exclude_interval()
    run.close("finished", together=True)
    return {**found, "batch": batch, "steps": steps, "first": _SETTLE}


def batch_of(training: Training, step_ms: float) -> tuple[int, float]:
    """With which a step takes about that long, or the least; and how long. Of rank 0, for all."""
    small, large = 16, 272
    training.block(_LEAST_STEPS, small)
    short, long = (training.block(_LEAST_STEPS, batch)[0] for batch in (small, large))
    of_sample = max(long - short, 1e-3) / (large - small)
    batch = max(1, round(small + (step_ms - short) / of_sample))
    found = torch.tensor([batch, max(step_ms, short)], dtype=torch.float64)
    dist.broadcast(found, src=0)
    return int(found[0]), float(found[1])


KINDS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (skew, codec, wire, clocks, cost)
}


def run(*, kind: str, folder: str, cases: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """All cases of a kind, arguments of its function, in one process group.

    Yields what this rank knows that the profile in FOLDER/NUMBER/run-0 has to find out.
    """
    torch.set_num_threads(1)
    for number, case in enumerate(cases):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        yield KINDS[kind](place, **case)
        dist.barrier()
        if dist.get_rank() == 0:
            print(kind, case, flush=True)
