"""Links between ranks: their clocks, latencies and rates.

Every node asks rank 0 what time it is, for the offset of its clock. An answer was given some time
between question and receipt. The one that came back fastest is the best: only then did nothing hold
up either way.

Rates of idle links are those of nccl-tests (``doc/PERFORMANCE.md``): the algorithm bandwidth is ``S
/ t``, and the bus bandwidth that times a factor of the operation and of the number of ranks, which
turns ``S`` into the bytes that pass the link of a rank in one direction. Gigabits are 10^9 bits.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist

from lightning_dist.base.private import all_gather_single, destroy_group
from lightning_dist.profiling.capture.events import BurstRecord, ClockRecord, LinkRecord
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
    machines = [of_rank["machine"] for of_rank in all_facts(facts, group=group, device=_CPU)]
    rank, leader_of = group.rank(), {machine: machines.index(machine) for machine in machines}
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


DTYPE = torch.float32
WARMUP = 2
"""Uses before the first that counts: connections are made, and what a shaped link has saved up for
a burst is spent."""

_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
}
OPS = tuple(_FACTORS)

_PROBE_BYTES = 2**18
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**26
_MOST_BYTES_INSIDE = 2**22
"""Inside a node, on its CPUs: no link is shaped."""
_SECONDS, _ENOUGH = 0.1, 0.8
"""Seconds that a use should take, and the fraction of them that is enough. Whenever ranks pause, a
shaped link saves up what it sends in some 10 ms, which then passes at once: a rate over much longer
is hardly too high."""
_GROWTH = 4
"""Factor from a use that was too short to the next. On a busy machine the first of all is slow, and
says little of how many bytes are enough."""
_PAIRS_SECONDS = 2.0
"""Time of all pairs. If they would take longer with the fewest bytes, they are left out."""
_PAIR_USES = 2
_MOST_NODES = 8
_BURST = 16
_BURST_BYTES = 4096
_BURST_USES = 5

Device: TypeAlias = torch.device | str


@dataclass(frozen=True)
class Measurement:
    """One collective of one size.

    Args:
        nbytes: ``S`` of nccl-tests: what a rank reduces, has gathered, sends to all, or is sent.
        ranks: members of the group.
        seconds: of every use, from its call to its result, on the rank where that took longest.
    """

    op: str
    nbytes: int
    ranks: int
    seconds: tuple[float, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return self.nbytes // DTYPE.itemsize

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)

    @property
    def sent(self) -> int:
        """Bytes that pass the link of a rank in one direction."""
        return round(self.nbytes * _FACTORS[self.op](self.ranks))

    @property
    def algbw_gbps(self) -> float:
        """``S / t``, in Gbit/s."""
        return self.nbytes * 8e-9 / self.median

    @property
    def busbw_gbps(self) -> float:
        """Comparable with the rate of the link, in Gbit/s."""
        return self.sent * 8e-9 / self.median


def measure(
    group: dist.ProcessGroup, op: str, nbytes: int, iterations: int, device: Device = "cpu"
) -> Measurement:
    """Use a collective of about ``nbytes`` and see how long it takes, for all ranks. Collective.

    Raises:
        ValueError: the operation is unknown, or there is nothing to measure.
    """
    ranks = group.size()
    if op not in _FACTORS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    _require_work(ranks, iterations)
    count = nbytes // (DTYPE.itemsize * ranks) * ranks
    if count == 0:
        raise ValueError(
            f"nbytes must be {DTYPE.itemsize * ranks} or more, one {DTYPE} for each of {ranks} "
            f"ranks, got {nbytes}"
        )
    content = torch.zeros(count, dtype=DTYPE, device=device)
    part = content[: count // ranks].clone()
    received = torch.empty_like(content) if op == "all_to_all" else content
    uses: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(content, group=group),
        "all_gather": lambda: all_gather_single(content, part, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, content, group=group),
        "broadcast": lambda: dist.broadcast(content, group_src=0, group=group),
    }
    seconds, _ = _timed(uses[op], group, iterations, device=device)
    return Measurement(op, count * DTYPE.itemsize, ranks, seconds)


def pairs(
    group: dist.ProcessGroup,
    nbytes: int,
    *,
    iterations: int = 3,
    device: Device = "cpu",
    least_seconds: float = 0.0,
) -> tuple[tuple[float | None, ...], ...]:
    """Rates in Gbit/s of each rank sending ``nbytes`` to each other, one pair at a time.

    Collective, with the same result on all ranks: ``[i][j]`` is from rank ``i`` of the group to
    ``j``, until ``i`` knew that ``j`` had all bytes, at best: a busy machine only adds to the time
    of a link. None from a rank to itself.

    Args:
        least_seconds: a pair that was faster sends more, up to 64 MiB.

    Raises:
        ValueError: there is nothing to measure.
    """
    rank, ranks = group.rank(), group.size()
    _require_work(ranks, iterations)
    if nbytes < 1:
        raise ValueError(f"nbytes must be 1 or more, got {nbytes}")
    answer = torch.empty(1, dtype=torch.uint8, device=device)

    def use(source: int, target: int, content: torch.Tensor) -> None:
        # Without an answer it would be done when the kernel has taken the bytes, not the target.
        if rank == source:
            group.send([content], target, 0).wait()
            group.recv([answer], target, 0).wait()
        elif rank == target:
            group.recv([content], source, 0).wait()
            group.send([answer], source, 0).wait()

    rates: list[list[float | None]] = [[None] * ranks for _ in range(ranks)]
    for source, target in permutations(range(ranks), 2):
        # In every use all ranks meet: those of the next pair wait until this one is done.
        for sent in _growing(nbytes, _MOST_BYTES):
            content = torch.zeros(sent if rank in (source, target) else 0, dtype=torch.uint8)
            exchange = partial(use, source, target, content.to(device))
            counts = rank == source
            seconds, _ = _timed(exchange, group, iterations, device=device, warmup=1, counts=counts)
            rates[source][target] = sent * 8e-9 / min(seconds)
            if min(seconds) >= least_seconds:
                break
    return tuple(map(tuple, rates))


def _growing(nbytes: int, most: int) -> Iterator[int]:
    yield nbytes
    while nbytes < most:
        yield (nbytes := min(_GROWTH * nbytes, most))


def measure_burst(
    group: dist.ProcessGroup, *, name: str, count: int, device: Device = "cpu"
) -> BurstRecord:
    """Gather a few bytes of every rank ``count`` times at once. Collective.

    Many small collectives are slow on any link. Medians; the time is equal on all ranks.
    """
    content = torch.zeros(_BURST_BYTES, dtype=torch.uint8, device=device)
    outputs = [content.new_zeros(group.size() * _BURST_BYTES) for _ in range(count)]

    def use() -> None:
        works = [all_gather_single(into, content, group=group, async_op=True) for into in outputs]
        for work in works:
            work.wait()

    seconds, cpu = _timed(use, group, _BURST_USES, device=device)
    sent = (group.size() - 1) * _BURST_BYTES
    return BurstRecord(name, "all_gather", sent, count, median(seconds), cpu)


def measure_links(
    group: dist.ProcessGroup, *, nodes: Sequence[str], name: str, device: Device = "cpu"
) -> list[LinkRecord | BurstRecord]:
    """A collective of all ranks, small ones, and each pair of nodes in turn. Collective.

    Takes about a second; on a link of 50 Mbit/s, two, and where there are pairs two more.

    Args:
        group: of all ranks, used for nothing else meanwhile.
        nodes: of every rank.
        name: of the group in the records.
        device: of the tensors. On an accelerator pairs are left out: each would open connections
            of its own.
    """
    if group.size() < 2:
        return []
    probe = measure(group, "all_reduce", _PROBE_BYTES, 1, device)
    is_cpu = torch.device(device).type == "cpu"
    most = _MOST_BYTES_INSIDE if is_cpu and len(set(nodes)) == 1 else _MOST_BYTES
    first = round(min(max(probe.sent / probe.median * _SECONDS, _LEAST_BYTES), most))
    for nbytes in _growing(first, most):
        whole = measure(group, "all_reduce", nbytes, 3, device)
        if whole.median >= _ENOUGH * _SECONDS:
            break
    records: list[LinkRecord | BurstRecord] = [
        LinkRecord(name, sent=whole.sent, seconds=whole.median),
        *(measure_burst(group, name=name, count=count, device=device) for count in (1, _BURST)),
    ]
    leaders = sorted(nodes.index(node) for node in set(nodes))
    if not is_cpu or not 2 <= len(leaders) <= _MOST_NODES:
        return records
    uses = (1 + _PAIR_USES) * len(leaders) * (len(leaders) - 1)
    seconds = min(_SECONDS, _PAIRS_SECONDS / uses)
    nbytes = min(nbytes, round(seconds * whole.sent / whole.median))
    if nbytes < _LEAST_BYTES:
        return records
    of_leaders = dist.new_group(leaders, backend="gloo")
    if dist.get_rank() in leaders:
        rates = pairs(of_leaders, nbytes, iterations=_PAIR_USES, least_seconds=_ENOUGH * seconds)[
            leaders.index(dist.get_rank())
        ]
        for peer, rate in zip(leaders, rates, strict=True):
            if rate is not None:
                lasted = nbytes * 8e-9 / rate
                records.append(LinkRecord(name, sent=nbytes, seconds=lasted, peer=peer))
        end_group(of_leaders)
    return records


def _require_work(ranks: int, iterations: int) -> None:
    if ranks < 2:
        raise ValueError(f"A bandwidth needs a group of 2 ranks or more, got {ranks}")
    if iterations < 1:
        raise ValueError(f"iterations must be 1 or more, got {iterations}")


def _timed(
    use: Callable[[], object],
    group: dist.ProcessGroup,
    iterations: int,
    *,
    device: Device,
    warmup: int = WARMUP,
    counts: bool = True,
) -> tuple[tuple[float, ...], float]:
    """Seconds of every use, on the rank where that took longest; and of all cores of this process.

    Args:
        counts: whether the time of this rank does.
    """
    seconds, cpus = [], []
    for _ in range(warmup + iterations):
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # all members have come
        _finish(device)
        begin, cpu = time.perf_counter(), time.process_time()
        use()
        _finish(device)
        seconds.append(time.perf_counter() - begin if counts else 0.0)
        cpus.append(time.process_time() - cpu)
    slowest = torch.tensor(seconds[warmup:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return tuple(slowest.tolist()), median(cpus[warmup:])


def _finish(device: Device) -> None:
    """Return when ``device`` has done all it was given."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def end_group(group: dist.ProcessGroup) -> None:
    """Let go of the connections of ``group``, which nobody uses any more. Collective.

    Raises:
        RuntimeError: of gloo: a member is gone or late; the group stays.
    """
    dist.barrier(group)  # a member that is still on its way would be cut off
    destroy_group(group)


def first_sentence(error: RuntimeError) -> str:
    """Message of gloo, without the place in gloo where it was raised."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]
