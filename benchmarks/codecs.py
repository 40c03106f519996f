"""How fast the kernels are beside a copy, and how much memory the reducer holds.

Speed: one thread, 26 MB of float32 gradient in the reducer's chunks, W = 2. Two passes
of each codec, eager and fused, interleaved with a copy of the same size, in thread CPU time (other
work on the machine then counts less); medians.

    encode   gradient (+ residual) -> payload
    settle   two payloads -> mean gradient (and own payload, gradient -> new residual)

`limit_pct` is (bytes that the pass must touch / measured copy rate) / measured time, where a copy
touches 8 bytes an element. A pass whose data were still in a cache may exceed 100.

Memory: 2 and 4 processes train 1,300 steps; what residuals and payload buffers take, per
compressed element, and the resident set after 300 steps and at the end.

    python -m benchmarks.codecs --json PATH [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import measure_memory
from benchmarks.report import collect_meta, print_table, write_json
from lightning_dist.codecs import CODECS, Codec
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.reducer.fusing import Variant, fused_passes
from lightning_dist.reducer.kernels import Factors, Kernels
from lightning_dist.reducer.plan import CHUNK_ELEMENTS

_CHUNKS = 25
_SEED = 1


class Passes:
    """Encode and settle of one codec over all chunks."""

    def __init__(self, codec: Codec, *, residual: bool, fused: bool) -> None:
        self.codec, self.residual = codec, residual
        self.blocks = CHUNK_ELEMENTS // codec.block
        factors = Factors(mean=0.5) if codec.exchange == "two_shot" else Factors(0.5, 2.0)
        self.kernels = Kernels(codec, factors=factors, world_size=2)
        if fused:
            device = torch.device("cpu")
            variant = Variant(self.kernels.passes, torch.float32, 1, residual, device)
            self.kernels.use(fused_passes(variant))
        generator = torch.Generator().manual_seed(_SEED)
        shape = (_CHUNKS, 1, self.blocks, codec.block)
        self.grad = torch.randn(shape, generator=generator)
        self.kept = torch.randn(shape, generator=generator) * 0.01 if residual else None
        self.scale, self.ok = torch.ones(()), torch.ones((), dtype=torch.bool)
        received = 2 if codec.exchange == "two_shot" else 1
        self.payloads = [[self._payload() for _ in range(received)] for _ in range(_CHUNKS)]

    def _payload(self) -> tuple[torch.Tensor, ...]:
        planes = self.codec.planes(torch.float32)
        buffer = torch.zeros(1, row_bytes(planes, self.blocks), dtype=torch.uint8)
        return views(buffer, planes, self.blocks)

    def encode(self) -> None:
        for i in range(_CHUNKS):
            kept = None if self.kept is None else self.kept[i]
            self.kernels.encode(self.grad[i], kept, self.scale, self.payloads[i][0])

    def settle(self) -> None:
        for i in range(_CHUNKS):
            kept = None if self.kept is None else self.kept[i]
            own, received = self.payloads[i][0], self.payloads[i]
            self.kernels.settle(self.grad[i], kept, self.scale, self.ok, own, received)

    def bytes_per_element(self) -> dict[str, float]:
        """What each pass must read and write at least."""
        wire = self.codec.wire_bytes(CHUNK_ELEMENTS) / CHUNK_ELEMENTS
        received = wire * len(self.payloads[0])
        # settle with a residual: read gradient, residual, payloads; write gradient, residual
        return {
            "encode": 4 + wire + (4 if self.residual else 0),
            "settle": 4 + received + (12 if self.residual else 0),
        }


def measure_speed(rounds: int) -> list[dict[str, Any]]:
    """One row per codec, residual and mode."""
    cases: dict[tuple[str, bool, str], Passes] = {}
    for name, codec in CODECS.items():
        for residual in (True, False) if codec.keeps_residual else (False,):
            for mode in ("eager", "fused"):
                passes = Passes(codec(), residual=residual, fused=mode == "fused")
                cases[name, residual, mode] = passes
    source = torch.zeros(_CHUNKS * CHUNK_ELEMENTS)
    target = torch.empty_like(source)
    copies: list[float] = []
    times: dict[tuple[tuple[str, bool, str], str], list[float]] = {}
    with torch.no_grad():
        for _ in range(rounds + 1):  # the first round warms up
            copies.append(_seconds(lambda: target.copy_(source)))
            for key, passes in cases.items():
                for name in ("encode", "settle"):
                    times.setdefault((key, name), []).append(_seconds(getattr(passes, name)))
    copy_rate = 2 * source.nbytes / statistics.median(copies[1:])
    rows = []
    for key, passes in cases.items():
        row: dict[str, Any] = dict(zip(("codec", "error_feedback", "mode"), key, strict=True))
        row["copy_gb_s"] = source.nbytes / statistics.median(copies[1:]) / 1e9
        total, least = 0.0, 0.0
        for name, touched in passes.bytes_per_element().items():
            samples = times[key, name][1:]
            seconds = statistics.median(samples)
            floor = touched * source.numel() / copy_rate
            row[f"{name}_gb_s"] = source.nbytes / seconds / 1e9
            row[f"{name}_ms_spread"] = [min(samples) * 1e3, max(samples) * 1e3]
            row[f"{name}_limit_pct"] = 100 * floor / seconds
            total, least = total + seconds, least + floor
        row["limit_pct"] = 100 * least / total
        rows.append(row)
    return rows


def _seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meta = collect_meta(seed=_SEED, arguments={"quick": arguments.quick})
    rows = measure_speed(rounds=5 if arguments.quick else 15)
    columns = ["codec", "error_feedback", "mode", "copy_gb_s", "encode_gb_s", "settle_gb_s"]
    columns += ["encode_limit_pct", "settle_limit_pct", "limit_pct"]
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    print_table("kernels, GB/s of float32 gradient, one thread", columns=columns, rows=cells)
    with tempfile.TemporaryDirectory() as folder:
        memory = measure_memory(Path(folder), steps=600 if arguments.quick else 1300)
    columns = list(memory[0])
    cells = [[_cell(row[column]) for column in columns] for row in memory]
    print_table("memory of one rank", columns=columns, rows=cells)
    if arguments.json:
        write_json(arguments.json, meta=meta, rows=[*rows, *memory])


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
