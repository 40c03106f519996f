"""One row: whether a checkpoint has the weights of the moment at which it was asked for.

    python -m benchmarks.gpu_check.checkpoint --json FILE [--device cuda]

The weights change in place on the device's stream, at once after the save was asked for and until
it is complete.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.results import parser_of, recording
from lightning_dist import AsyncTorchCheckpointIO

_TENSORS, _NUMEL = 64, 1 << 20


def measure(device: torch.device, folder: Path) -> dict[str, Any]:
    """Save, change, load, compare."""
    generator = torch.Generator(device).manual_seed(1)
    state = {
        f"{number}": torch.randn(_NUMEL, generator=generator, device=device)
        for number in range(_TENSORS)
    }
    expected = {name: each.cpu().clone() for name, each in state.items()}
    path, io = folder / "weights.ckpt", AsyncTorchCheckpointIO()
    begin = time.perf_counter()
    io.save_checkpoint(state, path)
    asked = time.perf_counter() - begin
    changes = 0
    while changes == 0 or not path.exists():
        for each in state.values():
            each.add_(1)
        changes += 1
    io.teardown()
    found = torch.load(path, map_location="cpu")
    return {
        "megabytes": sum(each.nbytes for each in expected.values()) / 1e6,
        "asked_ms": asked * 1e3,
        "changes": changes,
        "differing": sum(not torch.equal(found[name], expected[name]) for name in expected),
    }


def main() -> None:
    """Measure, and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args()
    with recording(given, seed=1) as record, tempfile.TemporaryDirectory() as folder:
        record.add([measure(torch.device(given.device), Path(folder))])


if __name__ == "__main__":
    main()
