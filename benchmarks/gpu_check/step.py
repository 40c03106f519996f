"""One row for each form of a training step: its time, launches, waits of the host, overlap, memory.

    python -m benchmarks.gpu_check.step --json FILE [--device cuda]

A GPT of 124 M parameters in bfloat16 under DDP, on one GPU. `ranks` 8 has a network in which the
payloads of the others are copies of the rank's own: all work of an exchange among eight but the
sending. Launches and waits are counted in one profiled step, at the interface of CUDA; overlap is
the share of the time of kernels on other streams during which the stream of the training works too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.results import parser_of, recording
from lightning_dist import compress_ddp
from lightning_dist.measurement.microbenchmark import Copies
from lightning_dist.ranks import Topology
from lightning_dist.reducer.network import Network
from lightning_dist.sync import ddp

DDP = "ddp"
FORMS = ((DDP, 1), ("none", 1), ("int8", 1), ("none", 8), ("int8", 8), ("topk", 8), ("powersgd", 8))
"""Codec and ranks."""
SIZES = {
    "cuda": {"vocabulary": 50257, "width": 768, "layers": 12, "context": 1024, "batch": 8},
    "cpu": {"vocabulary": 512, "width": 64, "layers": 2, "context": 16, "batch": 2},
}
_WARM, _STEPS = 3, 10
_LAUNCHES = ("LaunchKernel", "GraphLaunch")
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


class GPT(nn.Module):
    """Logits ``(B, T, vocabulary)`` of tokens ``(B, T)``; the embedding is the last layer too."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        return F.linear(hidden, self.embedding.weight)


@contextmanager
def among(ranks: int) -> Iterator[None]:
    """What is compressed within is exchanged with copies of ``ranks - 1`` others, if any."""

    def network(model: DistributedDataParallel, *_: object, **__: object) -> Network:
        topology = Topology(tuple(f"host{rank}" for rank in range(ranks)), 0)
        channel = Copies(ranks, model.process_group)
        return Network(channel, channel, topology, model.device)

    if ranks == 1:
        yield
    else:
        with patch.object(ddp, "network_for", network):
            yield


def measure(codec: str, ranks: int, *, device: torch.device, batch: int, **size: int) -> Any:
    """The row of a form."""
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(**size).to(device), gradient_as_bucket_view=True)
    handle = None
    if codec != DDP:
        with among(ranks):
            handle = compress_ddp(model, codec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(size["vocabulary"], (batch, size["context"] + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed() -> float:
        begin = time.perf_counter()
        step()
        synchronize(device)
        return time.perf_counter() - begin

    for _ in range(_WARM):
        step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [timed() for _ in range(_STEPS)]
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    row = {"codec": codec, "ranks": ranks, "peak_gb": peak, **profiled(step, device)}
    row |= {"step_ms": statistics.median(seconds) * 1e3}
    row |= {"step_ms_spread": [min(seconds) * 1e3, max(seconds) * 1e3]}
    held = {} if handle is None else handle.memory()
    for name in ("residual", "buffer"):
        row[f"{name}s_gb"] = held[f"{name}_bytes"] / 1e9 if held else None
    if handle is not None:
        handle.close()
    return row


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profiled(step: Any, device: torch.device) -> dict[str, Any]:
    """Counts of one step, and its overlap."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] * (device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities) as run:
            step()
            synchronize(device)
        path = Path(folder, "trace.json")
        run.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls = Counter(each["name"] for each in events if each.get("cat") == "cuda_runtime")
    calls += Counter(each["name"] for each in events if each.get("cat") == "cuda_driver")
    kernels = [each for each in events if each.get("cat") == "kernel"]

    def count(parts: Iterable[str]) -> int:
        return sum(n for name, n in calls.items() if any(part in name for part in parts))

    # The measurement itself waits once, at the end of the step.
    waits = max(0, count(_WAITS) - 1)
    return {"launches": count(_LAUNCHES), "host_waits": waits, "overlap": overlap(kernels)}


def overlap(kernels: Iterable[dict[str, Any]]) -> float | None:
    """The share of the time on other streams during which the busiest stream works."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for each in kernels:
        span = each["ts"], each["ts"] + each["dur"]
        spans.setdefault(each["args"]["stream"], []).append(span)
    busiest = max(spans.values(), key=lambda of: sum(b - a for a, b in of), default=[])
    others = [span for of in spans.values() if of is not busiest for span in of]
    total = sum(b - a for a, b in others)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in others for c, d in busiest)
    return both / total if total else None


def main() -> None:
    """Measure all forms."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args()
    device = torch.device(given.device, 0)
    backend = "nccl" if given.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with recording(given, seed=1) as record:
        for codec, ranks in FORMS:
            record.add([measure(codec, ranks, device=device, **SIZES[given.device])])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
