"""How fast a group moves bytes when nothing else is under way: its collectives, and its pairs.

Rates are those of nccl-tests (``doc/PERFORMANCE.md``): the algorithm bandwidth is ``S / t``, and
the bus bandwidth is that times a factor of the operation and of the number of ranks. The factor
turns ``S`` into the bytes that pass the link of a rank in one direction, so that the bus bandwidth
can be compared with the rate of the link, whatever the operation and the number of ranks. Gigabits
are 10^9 bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.profiling.peer import finish, meet, receive, send

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


@dataclass(frozen=True)
class Pairs:
    """What every rank of a group can send to every other one, one pair at a time.

    Args:
        nbytes: sent in one use.
        seconds: ``seconds[i][j]``, from rank ``i`` to rank ``j`` of the group, until ``i`` knew
            that ``j`` had it: the median. None from a rank to itself.
    """

    nbytes: int
    seconds: tuple[tuple[float | None, ...], ...]

    @property
    def gbps(self) -> tuple[tuple[float | None, ...], ...]:
        """The same as rates, in Gbit/s."""
        return tuple(
            tuple(None if each is None else self.nbytes * 8e-9 / each for each in row)
            for row in self.seconds
        )


def measure(
    group: dist.ProcessGroup,
    op: str,
    nbytes: int,
    iterations: int,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Use a collective of about ``nbytes`` and see how long it takes. Collective.

    The size is rounded down to as many elements as all ranks can have equally many of. All ranks
    have the same result.

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
    use = _use_of(op, count, group=group, device=device)
    for _ in range(WARMUP):
        use()
    seconds = []
    for _ in range(iterations):
        meet(group, device)
        begin = time.perf_counter()
        use()
        finish(device)
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return Measurement(op, count * DTYPE.itemsize, ranks, tuple(slowest.tolist()))


def pairs(
    group: dist.ProcessGroup,
    nbytes: int,
    *,
    iterations: int = 3,
    device: torch.device | str = "cpu",
) -> Pairs:
    """Let each rank send ``nbytes`` to each other one, one pair at a time. Collective.

    A ring is as fast as its slowest link, and this says which one that is. All ranks have the same
    result.

    Raises:
        ValueError: there is nothing to measure.
    """
    rank, ranks = group.rank(), group.size()
    _require_work(ranks, iterations)
    if nbytes < 1:
        raise ValueError(f"nbytes must be 1 or more, got {nbytes}")
    content = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    found = torch.zeros(ranks, ranks, dtype=torch.float64, device=device)
    for source in range(ranks):
        for target in range(ranks):
            if source == target:
                continue
            seconds = []
            for use in range(1 + iterations):
                meet(group, device)  # the ranks of the next pair wait until this one is done
                if rank == source:
                    taken = _answered(content, target, group=group, device=device)
                    seconds += [taken] if use else []
                elif rank == target:
                    receive(content, source=source, group=group)
                    send(content[:1], to=source, group=group)
            if rank == source:
                found[source, target] = median(seconds)
    dist.all_reduce(found, group=group)
    rows = [[float(each) for each in row] for row in found.tolist()]
    return Pairs(
        nbytes,
        tuple(
            tuple(None if i == j else each for j, each in enumerate(row))
            for i, row in enumerate(rows)
        ),
    )


def _require_work(ranks: int, iterations: int) -> None:
    if ranks < 2:
        raise ValueError(f"a bandwidth needs a group of 2 ranks or more, got {ranks}")
    if iterations < 1:
        raise ValueError(f"iterations must be 1 or more, got {iterations}")


def _use_of(
    op: str, count: int, *, group: dist.ProcessGroup, device: torch.device | str
) -> Callable[[], object]:
    content = torch.zeros(count, dtype=DTYPE, device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(content, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(content, group_src=0, group=group)
    if op == "all_gather":
        own = content[: count // group.size()].clone()
        return lambda: dist.all_gather_single(content, own, group=group)
    received = torch.empty_like(content)
    return lambda: dist.all_to_all_single(received, content, group=group)


def _answered(
    content: Tensor, target: int, *, group: dist.ProcessGroup, device: torch.device | str
) -> float:
    # Without an answer it would be done when the kernel has taken the bytes, not the other rank.
    answer = content.new_empty(1)
    begin = time.perf_counter()
    send(content, to=target, group=group)
    receive(answer, source=target, group=group)
    finish(device)
    return time.perf_counter() - begin
