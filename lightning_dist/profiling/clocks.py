"""How far the clocks of several hosts are apart: every host asks rank 0 what time it is.

An answer was given some time between question and receipt. Of many the one that came back fastest
is the best, by far: only then did nothing hold up either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.exchange.handshake import all_facts
from lightning_dist.profiling.analysis.clock_quality import uncertainty_at
from lightning_dist.profiling.capture.machine import this_machine
from lightning_dist.profiling.capture.records import ClockRecord
from lightning_dist.profiling.peer import receive, send

_FAN_OUT = 16
"""So many hosts ask the same rank, one after the other; more make a tree."""

_PATIENCE = 250_000_000
"""Nanoseconds after which a host asks no more: a busy link takes its time for every answer."""


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
    return _readings(group, reading)[leader_of[machines[rank]]]


def _ask(
    group: dist.ProcessGroup, server: int, *, rounds: int, clock: Callable[[], int]
) -> ClockRecord:
    question, answer = _messages()
    readings: list[ClockRecord] = []
    first = end = clock()
    is_last = False
    while not is_last:
        is_last = len(readings) + 1 >= rounds or end - first > _PATIENCE
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
        answer[0], answer[1] = now + own.offset, uncertainty_at([own], now) or 0
        send(answer, to=asker, group=group)


def _readings(group: dist.ProcessGroup, own: ClockRecord) -> Sequence[ClockRecord]:
    """Of every rank, in their order."""
    row = torch.tensor([own.at, own.offset, own.uncertainty], device="cpu")
    rows = row.new_empty(group.size() * len(row))
    dist.all_gather_single(rows, row, group=group)
    return [ClockRecord(*each) for each in rows.view(group.size(), -1).tolist()]
