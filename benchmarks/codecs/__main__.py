"""How fast the kernels are beside a copy, and how much memory the reducer holds.

Speed: one thread (CPU) or one device (`--device cuda`), 26 MB of float32 gradient in the reducer's
chunks, W = 2. Two passes of every codec of the table, eager and, where a compiler can make one loop
of it, fused; interleaved with a copy of the same size; medians. On CPU in thread CPU time (other
work on the machine then counts less), on CUDA between events.

    encode   gradient (+ residual) -> payload
    settle   two payloads -> mean gradient (and own payload, gradient -> new residual)

`limit_pct` is (bytes that the pass must touch / measured copy rate) / measured time, where a copy
touches 8 bytes an element. A pass whose data were still in a cache may exceed 100.

Memory: 2 and 4 processes train 1,300 steps with int8; what residuals and payload buffers take, per
compressed element, and the resident set after 300 steps and at the end.

    python -m benchmarks.codecs --json PATH [--quick] [--device cuda] [--codec NAME]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.codecs.memory import measure_memory
from benchmarks.docs_tables import print_tables
from benchmarks.harness.results import collect_meta, write_json
from lightning_dist.codecs import CODECS, BlockCodec, resolve_codec
from lightning_dist.reducer.alone import Passes, make_passes
from lightning_dist.reducer.chunk_sizes import CHUNK_ELEMENTS

_SEED = 1
_CHUNKS = 25
_NUMEL = _CHUNKS * CHUNK_ELEMENTS
_Case = tuple[str, bool, str]  # codec, error feedback, mode


def make_cases(names: Sequence[str], device: torch.device) -> dict[_Case, Passes]:
    """Every codec with its default feedback, and without; eager, and fused where that exists."""
    cases = {}
    for name in names:
        codec = resolve_codec(name)
        fusable = isinstance(codec, BlockCodec) and codec.fusable and not codec.lossless
        choices = (True, False) if codec.keeps_residual else (False,)
        for feedback in choices[:1] if codec.momentum_correction else choices:
            for mode in ("eager", "fused") if fusable else ("eager",):
                cases[name, feedback, mode] = make_passes(
                    codec,
                    feedback=feedback,
                    fused=mode == "fused",
                    device=device,
                    chunks=_CHUNKS,
                )
    return cases


def measure_speed(
    cases: dict[_Case, Passes], *, rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """One row per codec, feedback and mode."""
    source = torch.zeros(_NUMEL, device=device)
    target = torch.empty_like(source)
    copies: list[float] = []
    times: dict[tuple[_Case, str], list[float]] = {}
    with torch.no_grad():
        for _ in range(rounds + 1):  # the first round warms up
            copies.append(_seconds(lambda: target.copy_(source), device))
            for key, passes in cases.items():
                passes.prepare()
                for name in ("encode", "settle"):
                    seconds = _seconds(getattr(passes, name), device)
                    times.setdefault((key, name), []).append(seconds)
    copy_rate = 2 * source.nbytes / statistics.median(copies[1:])
    rows = []
    for key, passes in cases.items():
        row: dict[str, Any] = dict(zip(("codec", "error_feedback", "mode"), key, strict=True))
        row["device"] = device.type
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


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3
    start_s = time.thread_time()
    run()
    return time.thread_time() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--codec", action="append", help="of lightning_dist; repeatable")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    meta = collect_meta(seed=_SEED, arguments=settings)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    cases = make_cases(arguments.codec or list(CODECS), device)
    rows = measure_speed(cases, rounds=5 if arguments.quick else 15, device=device)
    dist.destroy_process_group()
    if not arguments.codec and device.type == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            rows += measure_memory(Path(folder), steps=600 if arguments.quick else 1300)
    print_tables(meta, rows, "kernels", "memory")
    if arguments.json:
        write_json(arguments.json, meta=meta, rows=rows)


if __name__ == "__main__":
    main()
