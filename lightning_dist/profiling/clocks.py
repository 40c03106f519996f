"""Offsets between the clocks of several nodes: every node asks rank 0 what time it is.

An answer was given some time between question and receipt. The one that came back fastest is the
best: only then did nothing hold up either way.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.base.private import all_gather_single
from lightning_dist.profiling.capture.events import ClockRecord
from lightning_dist.ranks.facts import all_facts

_CPU = torch.device("cpu")  # gloo's, where the program has another default device

_LONGEST = 250_000_000
"""Nanoseconds after which a node asks no more: a busy link takes its time for every answer."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME = Path("/proc/self/ns/time")


def read_offset(
    group: dist.ProcessGroup,
    *,
    rounds: int = 32,
    clock: Callable[[], int] = time.monotonic_ns,
    machine: str = "",
) -> ClockRecord:
    """Compare this rank's clock with that of rank 0. Collective, a few milliseconds a machine.

    One rank of every machine asks; the others there read the same clock. Best called where the
    network is idle: the offset of a busy one is true too, but its uncertainty is large.

    Args:
        group: of all ranks, on gloo, used for nothing else meanwhile.
        rounds: questions of a machine; fewer where the answers take long.
        clock: monotonic, in nanoseconds.
        machine: equal on ranks that share a clock; by default what the kernel says.

    Raises:
        RuntimeError: of gloo: a rank is gone, or did not come within the timeout of the group.
    """
    facts = {"machine": machine or this_machine()}
    machines = [each["machine"] for each in all_facts(facts, group=group, device=_CPU)]
    rank, leader_of = group.rank(), {each: machines.index(each) for each in machines}
    reading = ClockRecord(clock(), 0, 0)
    if rank == 0:
        for asker in [*leader_of.values()][1:]:
            _answer(group, asker, clock=clock)
    elif rank == leader_of[machines[rank]]:
        reading = _ask(group, rounds=rounds, clock=clock)
    row = torch.tensor([reading.at, reading.offset, reading.uncertainty], device=_CPU)
    rows = row.new_empty(group.size() * len(row))
    all_gather_single(rows, row, group=group)
    return ClockRecord(*rows.view(group.size(), -1)[leader_of[machines[rank]]].tolist())


def _ask(group: dist.ProcessGroup, *, rounds: int, clock: Callable[[], int]) -> ClockRecord:
    """The best of several readings; the last question says that it is."""
    question, answer = torch.zeros(2, 1, dtype=torch.int64, device=_CPU)
    readings: list[ClockRecord] = []
    first = end = clock()
    while not question.item():
        question[0] = len(readings) + 1 >= rounds or end - first > _LONGEST
        begin = clock()
        group.send([question], 0, 0).wait()
        group.recv([answer], 0, 0).wait()
        end = clock()
        at = (begin + end) // 2
        readings.append(ClockRecord(at, int(answer) - at, max(end - at, 1)))
    return min(readings, key=lambda reading: reading.uncertainty)


def _answer(group: dist.ProcessGroup, asker: int, *, clock: Callable[[], int]) -> None:
    """Say what time it is, until the last question of ``asker``."""
    question, answer = torch.zeros(2, 1, dtype=torch.int64, device=_CPU)
    while not question.item():
        group.recv([question], asker, 0).wait()
        answer[0] = clock()
        group.send([answer], asker, 0).wait()


def this_machine() -> str:
    """Identity of a monotonic clock: name of the node, start of its kernel, time namespace.

    Where the kernel does not tell when it has started, every process counts for itself.
    """
    boot, zone = f"process {os.getpid()}", ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    with suppress(OSError):  # kernels before 5.6 have one time for all
        zone = os.readlink(_TIME)
    return f"{socket.gethostname()} {boot} {zone}"
