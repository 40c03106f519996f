"""How fast the Triton kernels of a GPU are beside a copy, one launch for a whole bucket.

Float32 gradients of `--numel` elements in nine parameters, W = 8, in rows of a two-shot exchange:

    encode   gradient + residual -> payload, new residual
    reduce   this rank's row as 8 ranks encoded it -> mean, second error into the residual
    decode   payload of all rows -> gradient

`limit_pct` is (bytes that the pass must touch / measured copy rate) / measured time, where a copy
touches 8 bytes an element. Between events of the device, interleaved with the copy, medians. On a
CPU (`--device cpu`, with `TRITON_INTERPRET=1`) it only shows that the program runs.

    python -m benchmarks.kernels --json PATH [--numel N] [--codec NAME] [--device cuda]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.harness.results import parser_of, recording
from lightning_dist.codecs import BlockCodec, resolve_codec
from lightning_dist.kernels.triton import Slice, SliceTable, kernels_of

_WORLD_SIZE = 8
_PARAMETERS = 9
_SEED = 1
_CODECS = ("int8", "int4", "fp8", "sign", "qsgd", "terngrad")
_Pass = tuple[Callable[[], None], float]  # and the bytes that it must touch


def make_passes(codec: BlockCodec, *, numel: int, device: torch.device) -> dict[str, _Pass]:
    kernels = kernels_of(codec, dtype=torch.float32)
    if kernels is None:
        raise SystemExit(f"no kernels for {codec.name}: is Triton installed?")
    each = numel // _PARAMETERS
    slices = [Slice(f"p{i}", i * each, each, i * each) for i in range(_PARAMETERS)]
    table = SliceTable.of(codec, [slices], rows=_WORLD_SIZE, device=device)
    generator = torch.Generator(device).manual_seed(_SEED)
    flat = torch.randn(numel, generator=generator, device=device)
    residual = torch.randn(numel, generator=generator, device=device) * 0.1
    scale = torch.ones((), device=device)
    payload = torch.zeros(_WORLD_SIZE, table.row_bytes(0), dtype=torch.uint8, device=device)
    mean = torch.zeros_like(payload[0])
    finite = torch.ones((), dtype=torch.bool, device=device)
    salts = (
        torch.arange(_PARAMETERS, dtype=torch.int32, device=device) if codec.stochastic else None
    )
    encode = partial(
        kernels.encode, flat, residual, scale, table=table, payload=payload, finite=finite
    )
    reduce = partial(
        kernels.reduce, payload, mean, table=table, row=0, residual=residual, scale=scale
    )
    encode(salts=salts)  # the others need something to decode
    shares, sent = 8 * numel / _WORLD_SIZE, payload.nbytes
    return {
        "encode": (partial(encode, salts=salts), 12 * numel + sent),
        "reduce": (partial(reduce, salts=salts), shares + sent + mean.nbytes),
        "decode": (partial(kernels.decode, payload, flat, table=table), 4 * numel + sent),
    }


def measure(codec: BlockCodec, *, numel: int, rounds: int, device: torch.device) -> dict[str, Any]:
    passes = make_passes(codec, numel=numel, device=device)
    source = torch.zeros(numel, device=device)
    target = torch.empty_like(source)
    timed: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    timed |= {name: run for name, (run, _) in passes.items()}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, run in timed.items():
            seconds = _seconds(run, device)
            if number:  # the first round compiles and warms up
                times[name].append(seconds)
    middle = {name: statistics.median(of) for name, of in times.items()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    row: dict[str, Any] = {"codec": codec.name, "device": name, "numel": numel}
    row["copy_gb_s"] = 8 * numel / middle["copy"] / 1e9
    for name, (_, touched) in passes.items():
        row[f"{name}_ms"] = middle[name] * 1e3
        row[f"{name}_gb_s"] = touched / middle[name] / 1e9
        row[f"{name}_limit_pct"] = 100 * row[f"{name}_gb_s"] / row["copy_gb_s"]
    print(
        *(f"{key}={value:.4g}" if isinstance(value, float) else value for key, value in row.items())
    )
    return row


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--numel", type=int, default=9 << 22)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--codec", action="append", help="of lightning_dist; repeatable")
    given = parser.parse_args()
    device = torch.device(given.device)
    with recording(given, seed=_SEED) as record:
        for name in given.codec or _CODECS:
            codec = resolve_codec(name)
            assert isinstance(codec, BlockCodec)
            record.add([measure(codec, numel=given.numel, rounds=given.rounds, device=device)])


if __name__ == "__main__":
    main()
