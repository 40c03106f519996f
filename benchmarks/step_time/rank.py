"""One rank of the step-time benchmark; `__main__.py` says what it means.

Reads its settings from the command line as JSON. Rank 0 changes the rate of the links. The result
is the samples of every row, link by link.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import network
from benchmarks.harness.launch import send_result
from benchmarks.harness.tables import of_link
from benchmarks.step_time.rows import (
    COMPUTE_ROW,
    FEWEST_ROUNDS,
    FORMS,
    FP16_ROW,
    LAYERS,
    MOST_ROUNDS,
    NO_FEEDBACK_SUFFIX,
    ONE_BUCKET_ROW,
    PER_CHANNEL_ROW,
    PER_TENSOR_ROW,
    POWERSGD_ROW,
    WIDTH,
    Settings,
    is_torch_row,
    levels,
    split_row,
)

_TIMEOUT = timedelta(seconds=600)  # long enough for the other ranks to compile their kernels

Batch = tuple[torch.Tensor, torch.Tensor]
Sample = dict[str, Any]
Samples = dict[str, list[Sample]]


def measure(row: Row, batch: Batch) -> Sample:
    """Time one step between two barriers, which are outside the time, not outside the bytes.

    Lists have an element for every host; counters of ours are None where nothing of ours is
    attached.
    """
    link, host = os.environ["GLOO_SOCKET_IFNAME"], int(os.environ["GROUP_RANK"])
    dist.barrier()
    tx_before, lo_before = tx_bytes_of(link), tx_bytes_of("lo")
    start_ns = time.perf_counter_ns()
    row.step(*batch)
    elapsed_ns = time.perf_counter_ns() - start_ns
    dist.barrier()  # now every rank has received what this one sent
    tx, lo = tx_bytes_of(link) - tx_before, tx_bytes_of("lo") - lo_before
    row.forget()

    counted = [row.counted("inter_bytes"), row.counted("intra_bytes")]
    mine = torch.tensor([elapsed_ns, row.digest(), host, tx, lo, *counted])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    elapsed, digests, hosts = table[:, :3].unbind(dim=1)
    of_host = [table[hosts == each, 3:] for each in range(int(hosts.max()) + 1)]
    ours = row.handle is not None
    return {
        "step_s": elapsed.max().item() / 1e9,  # of the slowest rank
        "tx_bytes": [int(ranks[0, 0]) for ranks in of_host],  # its ranks see the same counter
        "lo_bytes": int(of_host[0][0, 1]),  # of host 0's loopback
        "identical": bool((digests == digests[0]).all()),  # parameters of all ranks, bit by bit
        "raw_bytes": row.counted("raw_bytes") if ours else None,  # of rank 0
        "inter_bytes": [int(ranks[:, 2].sum()) for ranks in of_host] if ours else None,
        "intra_bytes": [int(ranks[:, 3].sum()) for ranks in of_host] if ours else None,
    }


def measure_link(rows: list[Row], batch: Batch, settings: Settings, *, warmup: int) -> Samples:
    """Round robin over the rows, another one first in every round."""
    samples: Samples = {row.name: [] for row in rows}
    rounds = settings.rounds
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
            left_s = settings.seconds - (now - start)
            rounds = _affordable_rounds(left_s, round_s=now - last)
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
    samples = []
    for index, link_mbit in enumerate(settings.links):
        dist.barrier()
        if rank0:
            print(f"link: {of_link(link_mbit)}", flush=True)
            for namespace, device in settings.shaped:
                network.shape(namespace, device, rate_mbit=link_mbit)
        dist.barrier()
        warmup = settings.warmup if index == 0 else 1
        samples.append(measure_link(rows, batch, settings, warmup=warmup))
    send_result(samples)
    for row in rows:
        if row.handle is not None:
            row.handle.close()
    dist.barrier()
    dist.destroy_process_group()


def _affordable_rounds(left_s: float, *, round_s: float) -> int:
    """As many rounds as fit, the same number on every rank: rank 0's clock decides."""
    rounds = min(max(int(left_s / round_s), FEWEST_ROUNDS), MOST_ROUNDS)
    decided = torch.tensor(rounds)
    dist.broadcast(decided, src=0)
    return int(decided.item())


def tx_bytes_of(interface: str) -> int:
    """Bytes that an interface of this host has sent, from its own counter."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


_LEARNING_RATE = 1e-3
_ONE_BUCKET_MB = 4096  # larger than the model
_POWERSGD_RANK = 4
_POWERSGD_START = 2  # the earliest that the hook allows; before it is plain fp32


class Row:
    """One model of its own with its optimizer and what communicates for it."""

    def __init__(self, name: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.name = name
        cap_mb = _ONE_BUCKET_MB if name == ONE_BUCKET_ROW else None
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        self.handle = attach(self.ddp, name)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One training step; returns when the parameters are updated."""
        silent = self.ddp.no_sync() if self.name == COMPUTE_ROW else contextlib.nullcontext()
        with silent:
            loss = (self.ddp(inputs) - targets).square().sum(dim=1).mean()
            loss.backward()
        self.optimizer.step()

    def forget(self) -> None:
        """Free the gradients, so that only the row whose turn it is holds any."""
        self.optimizer.zero_grad(set_to_none=True)

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
    if is_torch_row(row):
        _attach_torch(ddp, row)
        return None
    from lightning_dist import compress_ddp
    from lightning_dist.codecs import BlockCodec, resolve_codec

    form, name = split_row(row)
    codec = name.removesuffix(NO_FEEDBACK_SUFFIX)
    options: dict[str, Any] = {"error_feedback": False} if codec != name else {}
    if form is not None:
        options["hierarchical"] = FORMS[form]
    intra, inter = levels(codec)
    if isinstance(resolve_codec(inter), BlockCodec):
        options["compile_kernels"] = True  # what a model of this size gets by default, but certain
    chosen: Any = inter if intra is None else {"intra": intra, "inter": inter}
    return compress_ddp(ddp, chosen, **options)


def _attach_torch(ddp: DistributedDataParallel, row: str) -> None:
    # Imported where needed: only the risky rows use what these load.
    if row == FP16_ROW:
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif row in (POWERSGD_ROW, ONE_BUCKET_ROW):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=_POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_START,
        )
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    elif row in (PER_TENSOR_ROW, PER_CHANNEL_ROW):
        import torch.ao.quantization  # noqa: F401 - the hooks use it and do not import it
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization

        per_tensor = row == PER_TENSOR_ROW
        name = "quantization_pertensor_hook" if per_tensor else "quantization_perchannel_hook"
        ddp.register_comm_hook(None, getattr(quantization, name))


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
