"""How far the clocks of several hosts are apart: every host asks rank 0 what time it is.

An answer was given some time between question and receipt. Of many the one that came back fastest
is the best, by far: only then did nothing hold up either way.
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
from torch import Tensor

from lightning_dist.exchange.handshake import all_facts
from lightning_dist.profiling.analysis.clock_quality import clock_at
from lightning_dist.profiling.capture.events import ClockRecord
from lightning_dist.profiling.links import receive, send

_FAN_OUT = 16
"""So many hosts ask the same rank, one after the other; more make a tree."""

_LONGEST = 250_000_000
"""Nanoseconds after which a host asks no more: a busy link takes its time for every answer."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME = Path("/proc/self/ns/time")


def read_offset(
    group: dist.ProcessGroup,
    *,
    rounds: int = 32,
    clock: Callable[[], int] = time.monotonic_ns,
    machine: str = "",
    fan_out: int = _FAN_OUT,
) -> ClockRecord:
    """Compare this rank's clock with that of rank 0. Collective, a few milliseconds.

    One rank of every machine asks; the others there read the same clock. Best called where the
    network is idle: the offset of a busy one is true too, but its uncertainty is large.

    Args:
        group: of all ranks, on gloo, used for nothing else meanwhile.
        rounds: questions of a machine; fewer where the answers take long.
        clock: monotonic, in nanoseconds.
        machine: equal on ranks that share a clock; by default what the kernel says.
        fan_out: machines that ask the same one.

    Raises:
        ValueError: ``rounds`` or ``fan_out`` is less than 1.
        RuntimeError: of gloo: a rank is gone, or did not come within the timeout of the group.
    """
    for name, value in (("rounds", rounds), ("fan_out", fan_out)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}; the default does")
    facts = {"machine": machine or this_machine()}
    machines = [
        str(each["machine"]) for each in all_facts(facts, group=group, device=torch.device("cpu"))
    ]
    leader_of: dict[str, int] = {}
    for rank, each in enumerate(machines):
        leader_of.setdefault(each, rank)
    leaders, rank = list(leader_of.values()), group.rank()
    reading = ClockRecord(clock(), 0, 0)
    if rank in leaders:
        place = leaders.index(rank)
        if place > 0:
            reading = _ask(group, leaders[(place - 1) // fan_out], rounds=rounds, clock=clock)
        for asker in leaders[place * fan_out + 1 : (place + 1) * fan_out + 1]:
            _answer(group, asker, reading, clock=clock)
    row = torch.tensor([reading.at, reading.offset, reading.uncertainty], device="cpu")
    rows = row.new_empty(group.size() * len(row))
    dist.all_gather_single(rows, row, group=group)
    return ClockRecord(*rows.view(group.size(), -1)[leader_of[machines[rank]]].tolist())


def _ask(
    group: dist.ProcessGroup, server: int, *, rounds: int, clock: Callable[[], int]
) -> ClockRecord:
    question, answer = _messages()
    readings: list[ClockRecord] = []
    first = end = clock()
    is_last = False
    while not is_last:
        is_last = len(readings) + 1 >= rounds or end - first > _LONGEST
        question[0] = is_last
        begin = clock()
        send(question, to=server, group=group)
        receive(answer, source=server, group=group)
        end = clock()
        now, its_uncertainty = answer.tolist()
        at = (begin + end) // 2
        readings.append(ClockRecord(at, now - at, max(end - at, 1) + its_uncertainty))
    return min(readings, key=lambda reading: reading.uncertainty)


def _messages() -> tuple[Tensor, Tensor]:
    """A question and an answer; gloo takes them where the program has another default device."""
    message = torch.zeros(3, dtype=torch.int64, device="cpu")
    return message[:1], message[1:]


def _answer(
    group: dist.ProcessGroup, asker: int, own: ClockRecord, *, clock: Callable[[], int]
) -> None:
    """Say what time it is on rank 0, until the last question of ``asker``."""
    question, answer = _messages()
    while not question.item():
        receive(question, source=asker, group=group)
        now = clock()
        answer[0], answer[1] = now + own.offset, clock_at([own], now).uncertainty
        send(answer, to=asker, group=group)


def this_machine() -> str:
    """The same for two processes only if their monotonic clocks are one.

    Name of the host, start of its kernel, and time namespace; a network namespace makes no
    difference. Where the kernel does not tell when it has started, every process counts for itself.
    """
    boot, zone = f"process {os.getpid()}", ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    with suppress(OSError):  # kernels before 5.6 have one time for all
        zone = os.readlink(_TIME)
    return f"{socket.gethostname()} {boot} {zone}"
