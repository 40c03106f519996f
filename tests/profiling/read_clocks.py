"""One rank: read planted clocks, one row after the other; print what every row has found.

A row is JSON: ``shifts`` and ``drifts`` by rank, ``machines`` by rank (without: what the kernel
says), ``arguments`` for ``read_offset``, and ``busy``: bytes that travel on another group all
the while.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from forked import TIMEOUT, run_ranks, say
from planted_clocks import PlantedClock

from lightning_dist.profiling.clocks import read_offset


def main() -> None:
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    bulk = dist.new_group(backend="gloo", timeout=TIMEOUT)
    found = []
    for text in sys.argv[1:]:
        row = json.loads(text)
        clock = PlantedClock(row["shifts"][rank], row.get("drifts", [0] * 99)[rank])
        machine = row["machines"][rank] if "machines" in row else ""

        def read(clock: PlantedClock = clock, machine: str = machine, row: Any = row) -> Any:
            arguments = row.get("arguments", {})
            return read_offset(group, clock=clock, machine=machine, **arguments)

        reading = while_busy(read, bulk, row["busy"]) if row.get("busy") else read()
        found.append({**msgspec.structs.asdict(reading), "calls": clock.calls})
        dist.barrier()
    say(rank=rank, found=found)


def while_busy(call: Callable[[], Any], group: dist.ProcessGroup, size: int) -> Any:
    """Result of ``call``, during which ``size`` bytes after ``size`` bytes are summed up."""
    done, travels = threading.Event(), threading.Event()
    payload = torch.zeros(size // 4)

    def travel() -> None:
        while payload[0] == 0:
            payload[0] = done.is_set()  # their sum: all ranks stop at once
            dist.all_reduce(payload, group=group)
            travels.set()

    thread = threading.Thread(target=travel, daemon=True)
    thread.start()
    if not travels.wait(TIMEOUT.total_seconds()):
        raise TimeoutError("nothing travels")
    result = call()
    done.set()
    thread.join(TIMEOUT.total_seconds())
    return result


if __name__ == "__main__":
    run_ranks(main, size=4)
