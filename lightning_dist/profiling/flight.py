"""torch's flight recorder, put beside a profile that ended badly: what nobody came to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch._C import _distributed_c10d as c10d

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def dump_flight_record(folder: Path, *, rank: int, environ: Mapping[str, str]) -> Path | None:
    """Write ``flight-rank<r>.json``: the newest collectives of this rank, where torch keeps them.

    torch does if ``TORCH_FR_BUFFER_SIZE`` is above 0 when the process begins.

    Returns the file, or None where there is nothing to write.
    """
    if not any(environ.get(name, "0") not in ("", "0") for name in _SIZES):
        return None
    path = folder / f"flight-rank{rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    return path
