"""One rank of the step-time benchmark, and the names of its rows; `__main__.py` explains them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.harness.tables import of_link
from benchmarks.harness.testbed import shape
from benchmarks.step_time.models import MODELS, Batch, Workload
from lightning_dist import compress_ddp
from lightning_dist.codecs import BlockCodec, resolve_codec
from lightning_dist.reducer.observer import Observer
from lightning_dist.reducer.units.base import CodecGroup

COMPUTE_ROW, DDP_ROW, FP16_ROW = BASELINES = ("no-comm", "ddp", "torch-fp16-hook")
POWERSGD_ROW, ONE_BUCKET_ROW = "torch-powersgd", "torch-powersgd-one-bucket"
RISKY_BASELINES = (POWERSGD_ROW, ONE_BUCKET_ROW, "torch-quant-pertensor", "torch-quant-perchannel")
"""torch's hooks of more than one collective. They may end or hang the process, so each is tried in
processes of its own before it joins the others."""
NO_FEEDBACK_SUFFIX = "-noef"
FORMS: dict[str, bool | str] = {"flat": False, "hierarchical": True, "leader": "leader"}
"""The name of a form -> what `compress_ddp(hierarchical=...)` calls it."""

DELAY = "delay"
"""In the place of a form: the mean of a step is applied in the next one."""

FEWEST_ROUNDS, MOST_ROUNDS = 3, 20  # where as many are taken as fit into a time

Samples = dict[str, list[dict[str, Any]]]


def run(
    *,
    rows: list[str],
    links: list[float | None],
    shaped: list[tuple[str, str]],
    warmup: int,
    rounds: int | None,
    seconds: float,
    batch: int,
    seed: int,
    model: str,
) -> Iterator[Samples]:
    """Make all rows, then measure them on one link after the other; samples of each link.

    Args:
        model: one of `MODELS`.
        shaped: namespaces and devices whose rate the links are; rank 0 changes it.
        warmup: rounds before the timed ones, on the first link.
        rounds: None: as many as fit into ``seconds`` of a link, warm-up included.
    """
    rank0 = dist.get_rank() == 0
    from benchmarks.step_time.sharded import ShardedRow, is_sharded

    made: list[Any] = []
    workload = MODELS[model]
    for name in rows:
        made.append((ShardedRow if is_sharded(name) else Row)(name, seed=seed, workload=workload))
        if rank0:
            print(f"  {name}", flush=True)  # where a set-up fails, this is the row before
    torch.manual_seed(seed + 1 + dist.get_rank())
    data = workload.batch(batch)
    for index, link_mbit in enumerate(links):
        dist.barrier()
        if rank0:
            print(f"link: {of_link(link_mbit)}", flush=True)
            for namespace, device in shaped:
                shape(namespace, device, rate_mbit=link_mbit)
        dist.barrier()
        untimed = warmup if index == 0 else 1
        yield measure_link(made, data, warmup=untimed, rounds=rounds, seconds=seconds)
    for row in made:
        row.close()


def measure_link(
    rows: list[Any], batch: Batch, *, warmup: int, rounds: int | None, seconds: float
) -> Samples:
    """Round robin over the rows, another one first in every round."""
    samples: Samples = {row.name: [] for row in rows}
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
        if index == warmup and rounds is None:  # the same on every rank: rank 0's clock decides
            affordable = int((seconds - (now - start)) / (now - last))
            decided = torch.tensor(min(max(affordable, FEWEST_ROUNDS), MOST_ROUNDS))
            dist.broadcast(decided, src=0)
            rounds = int(decided)
        print(f"  round {index} of {warmup + (rounds or 0)}, {now - last:.1f} s", flush=True)
        last = now
    return samples


def measure(row: Any, batch: Batch) -> dict[str, Any]:
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
    counted += [row.tail.ns, row.tail.sent]
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
        "tail_s": table[:, -2].max().item() / 1e9 if ours else None,  # of the slowest rank
        "last_bucket_bytes": [int(ranks[:, 5].sum()) for ranks in of_host] if ours else None,
    }


def split_row(row: str) -> tuple[str | None, str]:
    """The form of a row, None where it leaves that to `compress_ddp`, and the rest of its name."""
    form, mark, codec = row.partition("/")  # no name or option of a codec has it in it
    return (form, codec) if mark and form in (*FORMS, DELAY, "fsdp") else (None, row)


def levels(codec: str) -> tuple[str | None, str]:
    """The codecs within hosts and between them; within hosts None: what `compress_ddp` chooses."""
    intra, mark, inter = codec.partition("+")
    return (intra, inter) if mark else (None, codec)


def tx_bytes_of(interface: str) -> int:
    """Bytes that an interface of this host has sent, from its own counter."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


LEARNING_RATE = 1e-3
_ONE_BUCKET_MB = 4096  # larger than the model
_POWERSGD_RANK = 4
_POWERSGD_START = 2  # the earliest that the hook allows; before it is plain fp32


def digest_of(model: nn.Module) -> int:
    """63 bits that change with any bit of the parameters."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        digest.update(whole.numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 1


class Tail(Observer):
    """Time from the last gradient of a step to its last mean, and bytes of the last bucket."""

    def __init__(self) -> None:
        self.ns = self.sent = self._ready = 0

    @override
    def ready(self, bucket: int) -> None:
        self._ready = time.perf_counter_ns()

    @override
    def finished(self, buckets: Sequence[tuple[int, Sequence[CodecGroup]]]) -> None:
        self.ns = time.perf_counter_ns() - self._ready
        self.sent = sum(group.sent.inter for group in buckets[-1][1])


class Row:
    """One model of its own with its optimizer and what communicates for it."""

    def __init__(self, name: str, *, seed: int, workload: Workload = MODELS["linear"]) -> None:
        torch.manual_seed(seed)
        model = workload.make()
        self.name, self._loss = name, workload.loss
        cap_mb = _ONE_BUCKET_MB if name == ONE_BUCKET_ROW else None
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.handle, self.tail = attach(self.ddp, name), Tail()
        if self.handle is not None:
            self.handle.observe(self.tail)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One training step; returns when the parameters are updated."""
        silent = self.ddp.no_sync() if self.name == COMPUTE_ROW else contextlib.nullcontext()
        with silent:
            self._loss(self.ddp(inputs), targets).backward()
        self.optimizer.step()

    def digest(self) -> int:
        """Of the parameters, see :func:`digest_of`."""
        return digest_of(self.ddp)

    def forget(self) -> None:
        """Free the gradients, so that only the row whose turn it is holds any."""
        self.optimizer.zero_grad(set_to_none=True)

    def counted(self, key: str) -> int:
        """Bytes of the last step as our own counters have them; 0 where nothing counts."""
        return 0 if self.handle is None else int(self.handle.comm_stats()["last_step"][key])

    def close(self) -> None:
        """Let go of the model."""
        if self.handle is not None:
            self.handle.close()


def attach(ddp: DistributedDataParallel, row: str, **options: Any) -> Any | None:
    """Let the row's method communicate for the model; our handle, or None for torch's own.

    options: of `compress_ddp`, beside those that the row names.
    """
    if row in BASELINES + RISKY_BASELINES:
        _attach_torch(ddp, row)
        return None
    form, name = split_row(row)
    codec = name.removesuffix(NO_FEEDBACK_SUFFIX)
    if codec != name:
        options["error_feedback"] = False
    if form == DELAY:
        options["delay"] = 1
    elif form is not None:
        options["hierarchical"] = FORMS[form]
    intra, inter = levels(codec)
    if isinstance(resolve_codec(inter), BlockCodec):
        # What a model of the size of ours gets by default, but certain.
        options.setdefault("compile_kernels", True)
    return compress_ddp(ddp, {"intra": intra, "inter": inter} if intra else inter, **options)


def _attach_torch(ddp: DistributedDataParallel, row: str) -> None:
    # Imported where needed: only the risky rows use what these load.
    state, hook = None, None
    if row == FP16_ROW:
        hook = fp16_compress_hook
    elif row in (POWERSGD_ROW, ONE_BUCKET_ROW):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        hook = powersgd.powerSGD_hook
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=_POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_START,
        )
    elif row in RISKY_BASELINES:
        import torch.ao.quantization  # noqa: F401 - the hooks use it and do not import it
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization

        hook = getattr(quantization, f"quantization_{row.removeprefix('torch-quant-')}_hook")
    if hook is not None:
        ddp.register_comm_hook(state, hook)
