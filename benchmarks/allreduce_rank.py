"""One rank of the step-time benchmarks: `allreduce.py` and `hierarchical.py` say what it means.

Reads its settings from the command line as JSON. For every link rank 0 writes the samples of every
row as JSON; before every link but the first it waits until the launcher has changed the link.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.allreduce_rows import Row
from benchmarks.allreduce_settings import FEWEST_ROUNDS, MOST_ROUNDS, WIDTH, Settings
from benchmarks.gate import wait_at

_TIMEOUT = timedelta(seconds=600)  # long enough for the other ranks to compile their kernels
_LINK = os.environ["GLOO_SOCKET_IFNAME"]
_HOST = int(os.environ["GROUP_RANK"])

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(kw_only=True)
class Sample:
    """One timed step of one row. Lists have an element for every host."""

    step_s: float  # from before the forward to after the optimizer, of the slowest rank
    tx_bytes: list[int]  # what each host sent meanwhile, from its interface's counter
    lo_bytes: int  # the same of host 0's loopback
    identical: bool  # whether all ranks hold the same parameters, bit by bit
    raw_bytes: int | None  # our counter, rank 0; None where nothing of ours is attached
    inter_bytes: list[int] | None  # our counters, to other hosts, all ranks of a host
    intra_bytes: list[int] | None  # our counters, within the host, all ranks of it


def measure(row: Row, batch: Batch) -> Sample:
    """Time one step between two barriers, which are outside the time, not outside the bytes."""
    dist.barrier()
    tx_before, lo_before = _tx_bytes(_LINK), _tx_bytes("lo")
    start_ns = time.perf_counter_ns()
    row.step(*batch)
    elapsed_ns = time.perf_counter_ns() - start_ns
    dist.barrier()  # now every rank has received what this one sent
    tx, lo = _tx_bytes(_LINK) - tx_before, _tx_bytes("lo") - lo_before
    row.forget()

    counted = [row.counted("inter_bytes"), row.counted("intra_bytes")]
    mine = torch.tensor([elapsed_ns, row.digest(), _HOST, tx, lo, *counted])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    elapsed, digests, hosts = table[:, :3].unbind(dim=1)
    of_host = [table[hosts == host, 3:] for host in range(int(hosts.max()) + 1)]
    ours = row.handle is not None
    return Sample(
        step_s=elapsed.max().item() / 1e9,
        tx_bytes=[int(ranks[0, 0]) for ranks in of_host],  # its ranks see the same counter
        lo_bytes=int(of_host[0][0, 1]),
        identical=bool((digests == digests[0]).all()),
        raw_bytes=row.counted("raw_bytes") if ours else None,
        inter_bytes=[int(ranks[:, 2].sum()) for ranks in of_host] if ours else None,
        intra_bytes=[int(ranks[:, 3].sum()) for ranks in of_host] if ours else None,
    )


def measure_link(
    rows: list[Row], batch: Batch, *, warmup: int, rounds: int | None, seconds: float
) -> dict[str, list[Sample]]:
    """Round robin over the rows, another one first in every round."""
    samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
    start = last = time.perf_counter()
    index = 0
    while rounds is None or index < warmup + rounds:
        first = index % len(rows)
        for row in rows[first:] + rows[:first]:
            sample = measure(row, batch)
            if index >= warmup:
                samples[row.name].append(sample)
        index += 1
        now = time.perf_counter()
        if index == warmup and rounds is None:
            rounds = _affordable_rounds(seconds - (now - start), round_s=now - last)
        print(f"  round {index} of {warmup + (rounds or 0)}, {now - last:.1f} s", flush=True)
        last = now
    return samples


def run(settings: Settings) -> None:
    """Make all rows, then measure them on one link after the other."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank0 = dist.get_rank() == 0
    rows = []
    for name in settings.rows:
        rows.append(Row(name, seed=settings.seed))
        if rank0:
            print(f"  {name}", flush=True)  # where a set-up fails, this is the row before
    torch.manual_seed(settings.seed + 1 + dist.get_rank())
    batch = (torch.randn(settings.batch, WIDTH), torch.randn(settings.batch, WIDTH))
    for index, output in enumerate(settings.outputs):
        if index > 0 and rank0:
            wait_at(settings.gate)
        dist.barrier()
        warmup = settings.warmup if index == 0 else 1
        samples = measure_link(
            rows, batch, warmup=warmup, rounds=settings.rounds, seconds=settings.seconds
        )
        if rank0:
            listed = {name: [asdict(sample) for sample in of] for name, of in samples.items()}
            write_whole(Path(output), json.dumps(listed))
    print(f"  resident: {_resident_mb():.0f} MB per rank", flush=True)
    for row in rows:
        if row.handle is not None:
            row.handle.close()
    dist.barrier()
    dist.destroy_process_group()


def write_whole(path: Path, text: str) -> None:
    """The launcher reads the file as soon as it is there, so it must be there whole."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _affordable_rounds(left_s: float, *, round_s: float) -> int:
    """As many rounds as fit, the same number on every rank: rank 0's clock decides."""
    rounds = min(max(int(left_s / round_s), FEWEST_ROUNDS), MOST_ROUNDS)
    decided = torch.tensor(rounds)
    dist.broadcast(decided, src=0)
    return int(decided.item())


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _tx_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
