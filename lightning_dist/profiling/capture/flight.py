"""torch's flight recorder, put beside a profile that ended badly: what nobody came to."""

from __future__ import annotations

import json
from pathlib import Path

from torch._C import _distributed_c10d as c10d


def dump_flight_record(folder: Path, *, rank: int) -> Path | None:
    """Write ``flight-rank<r>.json``: the newest collectives of this rank, where torch keeps them.

    torch does, the newest 2,000, unless ``TORCH_FR_BUFFER_SIZE`` is 0 when the process begins.

    Returns the file, or None where there is nothing to write.
    """
    content: bytes = c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    if not json.loads(content).get("entries"):
        return None
    path = folder / f"flight-rank{rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
