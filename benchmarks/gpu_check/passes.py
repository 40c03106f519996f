"""One row for each codec: whether its fused passes on a device do what its definition does.

    python -m benchmarks.gpu_check.passes --json FILE [--device cuda] [--codec NAME]

Two steps of encode, exchange, decode with error feedback, by the units of the reducer, with the
kernels of training and by the eager definition, from the same gradients. Bits are compared.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.harness.results import parser_of, recording
from lightning_dist.codecs import CODECS, resolve_codec
from lightning_dist.measurement.microbenchmark import CodecWork

_STEPS = 2


def differing(name: str, device: torch.device) -> int:
    """Elements of the mean gradients of all steps that differ."""
    codec = resolve_codec(name)
    both = [
        CodecWork(codec, feedback=codec.keeps_residual, fused=fused, device=device, units=2)
        for fused in (True, False)
    ]
    count = 0
    for step in range(_STEPS):
        generator = torch.Generator(device).manual_seed(step)
        for each in both:
            each.prepare()
        drawn = torch.randn(both[0].numel, generator=generator, device=device)
        for each in both:
            each.bucket.copy_(drawn)
            each.encode()
            each.exchange()
            each.decode()
        found, expected = (each.bucket.view(torch.int32) for each in both)
        count += int((found != expected).sum())
    return count


def main() -> None:
    """Compare, and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--codec", action="append", help="of lightning_dist; repeatable")
    given = parser.parse_args()
    device = torch.device(given.device)
    backend = "nccl" if given.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with recording(given) as record, torch.no_grad():
        for name in given.codec or CODECS:
            if not resolve_codec(name).lossless and resolve_codec(name).fusable:
                record.add([{"codec": name, "differing": differing(name, device)}])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
