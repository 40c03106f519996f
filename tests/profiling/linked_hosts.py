"""One rank: print what it finds of the links between nodes, or of planted clocks, as JSON.

Arguments: ``links`` or ``burst``, in Mbit/s; or ``clocks`` and rows of :func:`read_row`.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from lightning_dist.base.private import destroy_group
from lightning_dist.profiling.capture.events import LinkRecord
from lightning_dist.profiling.links import OPS, measure, measure_links, pairs, read_offset

TIMEOUT_S = 30
SENT = 4_000_000  # many times what a shaped link saves up for a burst


def nbytes(op: str) -> int:
    """Of which each of two ranks sends ``SENT``."""
    return SENT if op in ("all_reduce", "broadcast") else 2 * SENT


@dataclass
class PlantedClock:
    """The clock of this machine, ahead by ``shift`` at its start and by ``drift`` per million more.

    Args:
        calls: how often it has been read.
    """

    shift: int = 0
    drift: int = 0
    calls: int = field(default=0, compare=False)

    def __call__(self) -> int:
        self.calls += 1
        return self.at(time.monotonic_ns())

    def at(self, true: int) -> int:
        """What it shows then."""
        return true + self.shift + true * self.drift // 1_000_000

    def true(self, shown: int) -> int:
        """When it shows that."""
        return (shown - self.shift) * 1_000_000 // (1_000_000 + self.drift)


def links() -> dict[str, Any]:
    fast = dist.new_group([0, 1])
    found = {}
    if dist.get_rank() < 2:
        # At best: a busy machine only adds to the time.
        every = {op: measure(fast, op, nbytes(op), 5) for op in OPS}
        found = {op: each.sent * 8e-6 / min(each.seconds) for op, each in every.items()}
    matrix = pairs(dist.group.WORLD, SENT // 2)
    rows = [[None if each is None else each * 1000 for each in row] for row in matrix]
    return {"found": found, "pairs": rows}


def burst() -> list[float]:
    """What nodes, and pairs of them, are measured to send, with a pause before each use."""
    meet = dist.all_reduce

    def pausing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = meet(tensor, *args, **kwargs)
        if tensor.numel() == 1:
            time.sleep(0.02)  # as a machine does that is busy
        return found

    dist.all_reduce = pausing
    nodes = [str(rank) for rank in range(dist.get_world_size())]
    return [
        each.sent * 8e-6 / each.seconds
        for each in measure_links(dist.new_group(), nodes=nodes, name="flat")
        if isinstance(each, LinkRecord)
    ]


def read_row(
    row: dict[str, Any], rank: int, group: dist.ProcessGroup, bulk: dist.ProcessGroup
) -> dict[str, int]:
    """What a rank reads of planted clocks.

    Args:
        row: ``shifts`` and ``drifts`` by rank, ``machines`` by rank (without: what the kernel
            says), ``arguments`` for ``read_offset``, and ``busy``: bytes that travel on ``bulk``
            all the while.
    """
    clock = PlantedClock(row["shifts"][rank], row.get("drifts", [0] * 99)[rank])
    machine = row["machines"][rank] if "machines" in row else ""

    def read() -> Any:
        return read_offset(group, clock=clock, machine=machine, **row.get("arguments", {}))

    reading = while_busy(read, bulk, row["busy"]) if row.get("busy") else read()
    return {**msgspec.structs.asdict(reading), "calls": clock.calls}


def while_busy(call: Callable[[], Any], group: dist.ProcessGroup, size: int) -> Any:
    """Result of ``call``, during which ``size`` bytes after ``size`` bytes are summed up."""
    done, travels = threading.Event(), threading.Event()
    payload = torch.zeros(size // 4)

    def travel() -> None:
        while payload[0] == 0:
            payload[0] = done.is_set()  # their sum: all ranks stop at once
            group.allreduce([payload]).wait()
            travels.set()

    thread = threading.Thread(target=travel, daemon=True)
    thread.start()
    if not travels.wait(TIMEOUT_S):
        raise TimeoutError("nothing travels")
    result = call()
    done.set()
    thread.join(TIMEOUT_S)
    return result


def clocks() -> list[dict[str, int]]:
    groups = dist.new_group(), dist.new_group()
    found = []
    for text in sys.argv[2:]:
        found.append(read_row(json.loads(text), dist.get_rank(), *groups))
        dist.barrier()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    print(json.dumps({"links": links, "burst": burst, "clocks": clocks}[sys.argv[1]]()))
    destroy_group()
