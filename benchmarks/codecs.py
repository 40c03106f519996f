"""How fast the kernels are beside a copy, and how much memory the reducer holds.

Speed: one thread (CPU) or one device (`--device cuda`), 26 MB of float32 gradient in the reducer's
units, W = 2. Two passes of every lossy codec of the table, eager and, where there are kernels,
fused; interleaved with a copy of the same size; medians. On CPU in thread CPU time (other work on
the machine then counts less), on CUDA between events.

    encode   gradient (+ residual) -> payload (and new residual)
    decode   two payloads -> mean gradient

`limit_pct` is (bytes that the pass must touch / measured copy rate) / measured time, where a copy
touches 8 bytes an element. A pass whose data were still in a cache may exceed 100.

Memory: 2, 4 and 8 processes train with int8 in 16 buckets, with both updates of the state; what
residuals and payload buffers take, per compressed element, and the resident set after 30 % of the
steps and at the end. The more ranks, the fewer steps.

    python -m benchmarks.codecs --json PATH [--rounds N] [--steps N] [--device cuda] [--only KIND]
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.launch import run_ranks
from benchmarks.harness.results import is_missing, parser_of, positive, recording
from benchmarks.harness.tables import Table, pivot
from lightning_dist import compress_ddp
from lightning_dist.base.exchanges import UNIT_ELEMENTS
from lightning_dist.codecs import CODECS, resolve_codec
from lightning_dist.measurement.microbenchmark import CodecWork

_SEED = 1
_UNITS = 25
_NUMEL = _UNITS * UNIT_ELEMENTS
_Case = tuple[str, bool, str]  # codec, error feedback, mode


def make_cases(names: Sequence[str], device: torch.device) -> dict[_Case, CodecWork]:
    """Every codec with its default feedback, and without; eager, and fused where that exists."""
    cases = {}
    for name in names:
        codec = resolve_codec(name)
        if codec.lossless:  # nothing is encoded: the bucket itself is sent
            continue
        choices = (True, False) if codec.keeps_residual else (False,)
        for feedback in choices[:1] if codec.momentum_correction else choices:
            for mode in ("eager", "fused") if codec.fusable else ("eager",):
                cases[name, feedback, mode] = CodecWork(
                    codec, feedback=feedback, fused=mode == "fused", device=device, units=_UNITS
                )
    return cases


def measure_speed(
    cases: dict[_Case, CodecWork], *, rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """One row per codec, feedback and mode."""
    source = torch.zeros(_NUMEL, device=device)
    target = torch.empty_like(source)
    copies: list[float] = []
    times: dict[tuple[_Case, str], list[float]] = {}
    with torch.no_grad():
        for number in range(rounds + 1):
            if number == 1:  # the first round warms up
                copies, times = [], {}
            copies.append(_seconds(lambda: target.copy_(source), device))
            for key, passes in cases.items():
                passes.prepare()
                times.setdefault((key, "encode"), []).append(_seconds(passes.encode, device))
                passes.exchange()
                times.setdefault((key, "decode"), []).append(_seconds(passes.decode, device))
    copy_s, gigabytes = statistics.median(copies), source.nbytes / 1e9
    rows = []
    for key, passes in cases.items():
        row: dict[str, Any] = {"kind": "kernels"}
        row |= zip(("codec", "error_feedback", "mode"), key, strict=True)
        row |= {"device": device.type, "copy_gb_s": gigabytes / copy_s}
        total = least = 0.0
        for name, touched in passes.bytes_per_element.items():
            samples = times[key, name]
            seconds, floor = statistics.median(samples), touched / 8 * copy_s
            row[f"{name}_gb_s"] = gigabytes / seconds
            row[f"{name}_ms_spread"] = [min(samples) * 1e3, max(samples) * 1e3]
            row[f"{name}_limit_pct"] = 100 * floor / seconds
            total, least = total + seconds, least + floor
        rows.append({**row, "limit_pct": 100 * least / total})
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


_WARM = 0.3  # of the steps: until the C library's allocator has settled; plain DDP moves too
_STEPS_OF = {2: 1.0, 4: 0.1, 8: 0.05}
"""Share of the steps by number of ranks, which are slow on few cores."""
_TIMEOUT_S = 600.0


_WIDTH, _LAYERS = 512, 16


def train(steps: int, state_update: Literal["immediate", "deferred"]) -> Iterator[dict[str, Any]]:
    """Bytes per compressed element, and how the resident set of this rank moves."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = (nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    handle = compress_ddp(model, "int8", compile_kernels=False, state_update=state_update)
    inputs = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(rank))
    resident, warm = {}, max(1, round(_WARM * steps))
    for step in range(steps):
        model.zero_grad()
        model(inputs).square().mean().backward()
        if step + 1 in (warm, steps):
            resident[step + 1] = psutil.Process().memory_info().rss / 2**20
    compressed = _LAYERS * _WIDTH**2
    held, stats = handle.memory(), handle.comm_stats()
    wire = stats["per_codec"]["int8"]["wire_bytes"] / stats["steps"]
    yield {
        "kind": "memory",
        "world_size": world_size,
        "commit": state_update,
        "steps": steps,
        "residual_bytes_per_element": held["residual_bytes"] / compressed,
        "buffer_bytes_per_element": held["buffer_bytes"] / compressed,
        "buffer_over_wire_bytes": held["buffer_bytes"] / wire,
        "resident_mb_warm": resident[warm],
        "resident_mb_end": resident[steps],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    handle.close()


def main() -> None:
    """Measure, show, and write."""
    parser = parser_of(__doc__, renews=True)
    parser.add_argument("--rounds", type=positive, default=15, help="of kernels (%(default)s)")
    parser.add_argument("--steps", type=positive, default=1000, help="of memory (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--codec", action="append", help="of lightning_dist; repeatable")
    parser.add_argument(
        "--only", choices=("kernels", "memory"), help="one of the two kinds of rows"
    )
    given = parser.parse_args()
    if is_missing(given.device):
        return
    torch.set_num_threads(1)
    device = torch.device(given.device)
    with recording(given, seed=_SEED) as record:
        if given.only != "memory":
            backend = "nccl" if given.device == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            cases = make_cases(given.codec or list(CODECS), device)
            record.add(measure_speed(cases, rounds=given.rounds, device=device), KERNELS)
            dist.destroy_process_group()
        if given.only != "kernels" and not given.codec and device.type == "cpu":
            of_worlds = [
                run_ranks(
                    train,
                    ranks=ranks,
                    timeout_s=_TIMEOUT_S,
                    steps=max(1, round(given.steps * share)),
                    state_update=state_update,
                )
                for ranks, share in _STEPS_OF.items()
                for state_update in ("immediate", "deferred")
            ]
            record.add([of_ranks[0][0] for of_ranks in of_worlds], MEMORY)


KERNELS = Table(
    kinds=("kernels",),
    lines=lambda rows: [
        row["by"].get("fused", row)
        for row in pivot(rows, of=["codec", "error_feedback"], by="mode")
    ],
    columns=[
        ("codec", "`{codec}`"),
        ("error feedback", "{error_feedback!y}"),
        ("kernels", "{mode}"),
        ("encode and update, GB/s", "{encode_gb_s:,.1f}"),
        ("% of copy", "{encode_limit_pct:,.0f}"),
        ("decode, GB/s", "{decode_gb_s:,.1f}"),
        ("% of copy", "{decode_limit_pct:,.0f}"),
        ("both, % of copy", "{limit_pct:,.0f}"),
    ],
    text=lambda meta, rows: (
        "GB of fp32 gradient per second of one thread's CPU time; a copy makes "
        f"{rows[0]['copy_gb_s']:.1f} GB/s. % of copy: of the rate at which a copy moves the bytes "
        "that the pass has to touch."
    ),
)


MEMORY = Table(
    kinds=("memory",),
    columns=[
        ("ranks", "{world_size}"),
        ("state update", "{commit}"),
        ("residual, bytes per element", "{residual_bytes_per_element:,.1f}"),
        ("payload buffers, bytes per element", "{buffer_bytes_per_element:,.1f}"),
        ("resident set after warm-up", "{resident_mb_warm:.0f} MB"),
        ("at the end", "{resident_mb_end:.0f} MB"),
        ("steps", "{steps:,}"),
    ],
    text="Memory of one rank.",
)


if __name__ == "__main__":
    main()
