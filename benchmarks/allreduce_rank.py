"""One rank of the step-time benchmark; `benchmarks/allreduce.py` starts it and says what it means.

Reads its settings from the command line as JSON. For every link rank 0 writes the samples of every
row as JSON; before every link but the first it waits until the launcher has changed the link.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.allreduce_settings import (
    BASELINES,
    COMPUTE_ROW,
    FP16_ROW,
    LAYERS,
    NO_FEEDBACK_SUFFIX,
    WIDTH,
    Settings,
)
from benchmarks.gate import wait_at

_LEARNING_RATE = 1e-3
_TIMEOUT = timedelta(seconds=300)  # long enough for the other ranks to compile their kernels


@dataclass(kw_only=True)
class Sample:
    """One timed step of one row."""

    step_s: float  # from before the forward to after the optimizer, of the slowest rank
    tx_bytes: int  # what host 0 sent meanwhile, from its interface's counter
    identical: bool  # whether all ranks hold the same parameters, bit by bit
    raw_bytes: int | None  # our counter, rank 0; None where nothing of ours is attached
    counted_bytes: int | None  # our counters, to other hosts, all ranks of host 0


class Row:
    """One model of its own with its optimizer and what communicates for it."""

    def __init__(self, name: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.name = name
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        self.handle = attach(self.ddp, name)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One training step; returns when the parameters are updated."""
        silent = self.ddp.no_sync() if self.name == COMPUTE_ROW else contextlib.nullcontext()
        self.optimizer.zero_grad()
        with silent:
            loss = (self.ddp(inputs) - targets).square().sum(dim=1).mean()
            loss.backward()
        self.optimizer.step()

    def digest(self) -> int:
        """63 bits that change with any bit of the parameters."""
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self.ddp.parameters():
            digest.update(parameter.detach().numpy().data)
        return int.from_bytes(digest.digest(), "little") >> 1

    def counted(self, key: str) -> int:
        """Bytes of the last step as our own counters have them; 0 where nothing counts."""
        return 0 if self.handle is None else int(self.handle.comm_stats()["last_step"][key])


def attach(ddp: DistributedDataParallel, row: str) -> Any | None:
    """Let the row's method communicate for the model; our handle, or None for torch's own."""
    if row == FP16_ROW:
        ddp.register_comm_hook(None, fp16_compress_hook)
    if row in BASELINES:
        return None
    from lightning_dist import compress_ddp

    codec = row.removesuffix(NO_FEEDBACK_SUFFIX)
    options: dict[str, Any] = {"error_feedback": False} if codec != row else {}
    return compress_ddp(ddp, codec, compile_kernels=True, **options)


def measure(row: Row, batch: tuple[torch.Tensor, torch.Tensor]) -> Sample:
    """Time one step between two barriers, which are outside the time, not outside the bytes."""
    dist.barrier()
    tx_before = _tx_bytes()
    start_ns = time.perf_counter_ns()
    row.step(*batch)
    elapsed_ns = time.perf_counter_ns() - start_ns
    dist.barrier()  # now every rank has received what this one sent
    tx = _tx_bytes() - tx_before

    mine = torch.tensor([elapsed_ns, row.digest(), row.counted("inter_bytes")])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    elapsed, digests, inter_bytes = torch.stack(everyone).unbind(dim=1)
    of_host0 = inter_bytes[: int(os.environ["LOCAL_WORLD_SIZE"])]
    ours = row.handle is not None
    return Sample(
        step_s=elapsed.max().item() / 1e9,
        tx_bytes=tx,
        identical=bool((digests == digests[0]).all()),
        raw_bytes=row.counted("raw_bytes") if ours else None,
        counted_bytes=int(of_host0.sum()) if ours else None,
    )


def measure_link(
    rows: list[Row], batch: tuple[torch.Tensor, torch.Tensor], *, warmup: int, rounds: int
) -> dict[str, list[Sample]]:
    """Round robin over the rows, another one first in every round."""
    samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
    for index in range(warmup + rounds):
        first = index % len(rows)
        for row in rows[first:] + rows[:first]:
            sample = measure(row, batch)
            if index >= warmup:
                samples[row.name].append(sample)
        print(f"  round {index + 1} of {warmup + rounds}", flush=True)
    return samples


def run(settings: Settings) -> None:
    """Make all rows, then measure them on one link after the other."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank0 = dist.get_rank() == 0
    rows = [Row(name, seed=settings.seed) for name in settings.rows]
    torch.manual_seed(settings.seed + 1 + dist.get_rank())
    batch = (torch.randn(settings.batch, WIDTH), torch.randn(settings.batch, WIDTH))
    for index, output in enumerate(settings.outputs):
        if index > 0 and rank0:
            wait_at(settings.gate)
        dist.barrier()
        warmup = settings.warmup if index == 0 else 1
        samples = measure_link(rows, batch, warmup=warmup, rounds=settings.rounds)
        if rank0:
            listed = {name: [asdict(sample) for sample in of] for name, of in samples.items()}
            Path(output).write_text(json.dumps(listed))
    for row in rows:
        if row.handle is not None:
            row.handle.close()
    dist.barrier()
    dist.destroy_process_group()


def _tx_bytes() -> int:
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
