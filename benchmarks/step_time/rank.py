"""One rank of the step-time benchmark, and the names of its rows; `__main__.py` explains them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from benchmarks.convergence.tasks import DEMO_GPT, Task, make_task
from benchmarks.harness.rows import COMPUTE_ROW, Row, digest_of, rotated, tx_bytes_of
from benchmarks.harness.tables import of_link
from benchmarks.harness.testbed import shape
from lightning_dist.reducer.stats import Observer
from lightning_dist.reducer.units.base import CodecGroup

LEARNING_RATE = 1e-3
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
        model: name of a task.
        batch: samples of this rank.
        shaped: namespaces and devices whose rate the links are; rank 0 changes it.
        warmup: rounds before the timed ones, on the first link.
        rounds: None: as many as fit into ``seconds`` of a link, warm-up included.
    """
    rank0 = dist.get_rank() == 0
    made: list[TimedRow] = []
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    settings = {**(DEMO_GPT if model == "gpt" else {}), "batch": batch * place["world_size"]}
    task = make_task(model, settings, **place)
    for name in rows:
        made.append(TimedRow(name, task, seed=seed))
        if rank0:
            print(f"  {name}", flush=True)  # where a set-up fails, this is the row before
    data = next(task.batches(seed))
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
    rows: list[TimedRow], batch: Any, *, warmup: int, rounds: int | None, seconds: float
) -> Samples:
    """Round robin over the rows, another one first in every round."""
    samples: Samples = {row.text: [] for row in rows}
    start = last = time.perf_counter()
    index = 0
    while rounds is None or index < warmup + rounds:
        for row in rotated(rows, index):
            sample = measure(row, batch)
            if index >= warmup:
                samples[row.text].append(sample)
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


def measure(row: TimedRow, batch: Any) -> dict[str, Any]:
    """Time one step between two barriers, which are outside the time, not outside the bytes.

    Lists have an element for every host; counters of ours are None where nothing of ours is
    attached, but for ``raw_bytes``: torch has an allreduce there, or nothing.
    """
    link, host = os.environ["GLOO_SOCKET_IFNAME"], int(os.environ["GROUP_RANK"])
    dist.barrier()
    tx_before, lo_before = tx_bytes_of(link), tx_bytes_of("lo")
    start_ns = time.perf_counter_ns()
    row.step(batch)
    elapsed_ns = time.perf_counter_ns() - start_ns
    dist.barrier()  # now every rank has received what this one sent
    tx, lo = tx_bytes_of(link) - tx_before, tx_bytes_of("lo") - lo_before
    row.optimizer.zero_grad(set_to_none=True)  # only the row whose turn it is holds gradients

    digest = 0 if row.name.all_ranks else digest_of(row.model)  # no rank has another's shard
    counted = [row.counted("inter_bytes"), row.counted("intra_bytes")]
    counted += [row.tail.ns, row.tail.sent]
    mine = torch.tensor([elapsed_ns, digest, host, tx, lo, *counted])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    elapsed, digests, hosts = table[:, :3].unbind(dim=1)
    of_host = [table[hosts == each, 3:] for each in range(int(hosts.max()) + 1)]
    ours, world = row.reducer is not None, dist.get_world_size()
    raw_bytes = (
        0 if row.text == COMPUTE_ROW else round(row.gradient_bytes * 2 * (world - 1) / world)
    )
    return {
        "step_s": elapsed.max().item() / 1e9,  # of the slowest rank
        "tx_bytes": [int(ranks[0, 0]) for ranks in of_host],  # its ranks see the same counter
        "lo_bytes": int(of_host[0][0, 1]),  # of host 0's loopback
        "identical": bool((digests == digests[0]).all()),  # parameters of all ranks, bit by bit
        "raw_bytes": row.counted("raw_bytes") if ours else raw_bytes,  # of rank 0
        "inter_bytes": [int(ranks[:, 2].sum()) for ranks in of_host] if ours else None,
        "intra_bytes": [int(ranks[:, 3].sum()) for ranks in of_host] if ours else None,
        "tail_s": table[:, -2].max().item() / 1e9 if ours else None,  # of the slowest rank
        "last_bucket_bytes": [int(ranks[:, 5].sum()) for ranks in of_host] if ours else None,
    }


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


class TimedRow(Row):
    """A row with the model of a task and SGD."""

    def __init__(self, text: str, task: Task, *, seed: int) -> None:
        torch.manual_seed(seed)
        model = task.model()
        self.gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
        super().__init__(
            text,
            model,
            lambda model: torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            blocks=task.blocks(model),
            shards=int(os.environ["LOCAL_WORLD_SIZE"]),
        )
        self._task, self.tail = task, Tail()
        if self.reducer is not None:
            self.reducer.observe(self.tail)

    def step(self, batch: Any) -> None:
        """One training step; returns when the parameters are updated."""
        self.backward(lambda model: self._task.loss(model, batch))
        self.optimizer.step()

    def counted(self, key: str) -> int:
        """Bytes of the last step as our own counters have them; 0 where nothing counts."""
        return 0 if self.reducer is None else int(self.reducer.comm_stats()["last_step"][key])
