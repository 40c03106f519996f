"""One rank of benchmarks/profiler: [{"case": NAME, "folder": FOLDER, "arguments": {...}}, ...].

The cases are done one after the other in one process group. A profile goes to FOLDER/run-<n>, and
what this rank knows that the profile has to find out, to FOLDER/truth-<rank>.json.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp
from lightning_dist.integrations.profile_run import ProfileRun
from lightning_dist.profiling.capture.session import SessionSettings
from lightning_dist.profiling.clocks import read_offset
from lightning_dist.reducer.block_chunk import BlockChunk

_TIMEOUT = timedelta(seconds=120)


FIRST = 4
"""Steps before the first one in which a rank is late."""
_WIDTH = 256


@contextmanager
def every_step(model: DistributedDataParallel, folder: Path) -> Iterator[None]:
    """A profile with all steps in detail."""
    run = ProfileRun(model, parent=folder, settings=SessionSettings(max_overhead=1))
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


_COST_WIDTH = 128
_COST_LAYERS = 40
_LEAST_STEPS = 3
_SETTLE = 48
"""Steps in which the profiler finds out how many it may look at. They do not count."""


def cost(
    folder: Path,
    *,
    codec: str,
    buckets: int,
    step_ms: float,
    rounds: int,
    block_s: float,
    budget: float,
) -> dict[str, Any]:
    """Wall and CPU milliseconds of a step, a pair for every block, by whether it was profiled."""
    bare, profiled = (Training(codec, buckets=buckets) for _ in range(2))
    batch, estimate_ms = batch_of(bare, step_ms)
    run = ProfileRun(profiled.model, parent=folder, settings=SessionSettings(max_overhead=budget))
    for training in (bare, profiled):
        training.block(_SETTLE, batch)
    steps = max(_LEAST_STEPS, round(1000 * block_s / estimate_ms))
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


class Training:
    """Layers whose gradients are ``buckets`` buckets, as many in each."""

    def __init__(
        self, codec: str, *, buckets: int, layers: int = _COST_LAYERS, width: int = _COST_WIDTH
    ) -> None:
        torch.manual_seed(0)
        self._width = width
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        # A bucket is closed by the parameter that reaches the cap: weights do, biases are small.
        cap = (width + 1) * width * 4 / 2**20 * layers / buckets * 0.98
        self.model = compressed(DistributedDataParallel(module, bucket_cap_mb=cap), codec)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def block(self, steps: int, batch: int) -> tuple[float, float]:
        """Wall and CPU milliseconds of a step."""
        inputs = torch.ones(batch, self._width)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.model(inputs).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return 1000 * wall / steps, 1000 * cpu / steps


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


_WIRE_WIDTH = 1024
_WIRE_LAYERS = 4
_BULK = 1 << 20
"""Bytes that one message of the load has."""
_PATIENCE_S = 60.0


def wire(folder: Path, *, codec: str, steps: int) -> None:
    """17 MB of gradients of one sample."""
    module = nn.Sequential(*(nn.Linear(_WIRE_WIDTH, _WIRE_WIDTH) for _ in range(_WIRE_LAYERS)))
    model = compressed(DistributedDataParallel(module, bucket_cap_mb=8), codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with every_step(model, folder):
        for _ in range(steps):
            model(torch.ones(1, _WIRE_WIDTH)).sum().backward()
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


CASES: dict[str, Callable[..., Any]] = {
    "skew": skew,
    "codec": codec_time,
    "wire": wire,
    "clocks": clocks,
    "cost": cost,
}
"""Each is called with the folder and the arguments, and returns what this rank knows."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    for each in json.loads(sys.argv[1]):
        folder = Path(each["folder"])
        truth = CASES[each["case"]](folder, **each["arguments"])
        (folder / f"truth-{dist.get_rank()}.json").write_text(json.dumps(truth))
        dist.barrier()
        if dist.get_rank() == 0:
            print(each["case"], each["arguments"], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
