"""What the launcher and the ranks of the time-to-accuracy benchmark agree on; imports no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.ranks import same_on_all_ranks
from benchmarks.convergence.tasks import GptSettings, GptTask
from benchmarks.step_time.rank import tx_bytes_of
from benchmarks.step_time.rows import BASELINES, COMPUTE_ROW, DDP_ROW, FP16_ROW
from lightning_dist import compress_ddp
from lightning_dist.integrations.networks import Groups, new_groups

_SMOOTHED_OVER = 3  # evaluations: one alone goes up and down by what ten steps gain


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the launcher tells every rank."""

    rows: list[str]
    seeds: list[int]
    outputs: list[str]  # one path for every seed
    steps: int  # of fp32 DDP, whose loss after them is the target
    evaluate_every: int  # steps; the resolution of every time and step count
    patience: float  # rows that are not there after `patience * steps` give up
    batch: int  # windows per step of all ranks together
    context: int
    d_model: int
    n_layers: int
    n_heads: int
    lr: float
    val_windows: int
    compile_kernels: bool


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row after some steps: all numbers from its start, without evaluations."""

    step: int
    seconds: float  # of the slowest rank
    tx_bytes: int  # sent by host 0, from its interface's counter
    val_loss: float | None  # None for no-comm, which does not learn together


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of every evaluation and the two before it: what is compared with the target."""
    parts = [losses[max(0, i + 1 - _SMOOTHED_OVER) : i + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


# A loss that differs from ddp's in the sixth digit must not cost a row a whole block more.
_LEEWAY = 1.002
_DIVERGED = 1e9  # a loss that JSON can hold
_TIMEOUT = timedelta(seconds=300)  # long enough for the other ranks to compile their kernels


class Runner:
    """One row of one seed: a training of its own that runs in blocks of steps."""

    def __init__(self, name: str, task: GptTask, *, seed: int, setup: Settings, groups: Groups):
        torch.manual_seed(seed)
        self.name, self._task = name, task
        self.model = task.model()
        self.ddp = DistributedDataParallel(self.model)
        self.handle: Any = None
        if name == FP16_ROW:
            self.ddp.register_comm_hook(None, fp16_compress_hook)
        elif name not in BASELINES:
            compiled = setup.compile_kernels
            self.handle = compress_ddp(self.ddp, name, compile_kernels=compiled, groups=groups)
        # AdamW has moments of its own in any case: a codec's momentum changes nothing here.
        self._optimizer, self._schedule = task.optimizer(self.model, own_momentum=False)
        self._batches = task.batches(seed)
        self.curve: list[Point] = []

    def run(self, steps: int) -> None:
        """Train on, timed between two barriers, then evaluate, which is not timed."""
        dist.barrier()
        tx_before, began = tx_bytes_of(os.environ["GLOO_SOCKET_IFNAME"]), time.perf_counter()
        for _ in range(steps):
            self._step()
        elapsed = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.barrier()  # now every rank has received what this one sent
        tx = tx_bytes_of(os.environ["GLOO_SOCKET_IFNAME"]) - tx_before
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        last = self.curve[-1] if self.curve else Point(step=0, seconds=0, tx_bytes=0, val_loss=None)
        self.curve.append(
            Point(
                step=last.step + steps,
                seconds=last.seconds + elapsed.item(),
                tx_bytes=last.tx_bytes + tx,
                val_loss=None if self.name == COMPUTE_ROW else self._evaluate(),
            )
        )

    def losses(self) -> list[float]:
        """Smoothed, one for each evaluation; none for no-comm."""
        return smoothed([p.val_loss for p in self.curve if p.val_loss is not None])

    def reached(self, target: float) -> bool:
        """Whether a loss as low as this was seen at any evaluation; no-comm need not."""
        return self.name == COMPUTE_ROW or min(self.losses()) <= target

    def close(self) -> None:
        """Let the codec's worker end."""
        if self.handle is not None:
            self.handle.close()

    def _step(self) -> None:
        silent = self.ddp.no_sync() if self.name == COMPUTE_ROW else contextlib.nullcontext()
        self._optimizer.zero_grad()
        with silent:
            self._task.loss(self.ddp, next(self._batches)).backward()
        self._task.before_step(self.model)
        self._optimizer.step()
        self._schedule.step()

    def _evaluate(self) -> float:
        """The mean over all ranks, each of which takes its share of the windows."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        loss = torch.tensor(list(self._task.evaluate(self.model, part=mine).values()))
        dist.all_reduce(loss)
        mean = loss.item() / dist.get_world_size()
        return mean if math.isfinite(mean) else _DIVERGED


def race(runners: Sequence[Runner], setup: Settings) -> float:
    """Blocks of all rows in turn, another one first in every round; returns the target loss."""
    rounds = setup.steps // setup.evaluate_every
    (ddp,) = (runner for runner in runners if runner.name == DDP_ROW)
    for index in range(rounds):
        first = index % len(runners)
        for runner in [*runners[first:], *runners[:first]]:
            runner.run(setup.evaluate_every)
        print(f"  step {ddp.curve[-1].step}: ddp at {ddp.losses()[-1]:.3f}", flush=True)
    target = ddp.losses()[-1] * _LEEWAY
    for _ in range(round(rounds * (setup.patience - 1))):
        for runner in runners:
            if not runner.reached(target):  # the loss is the same number on all ranks
                runner.run(setup.evaluate_every)
    return target


def run(setup: Settings) -> None:
    """Every seed: all rows from the same weights, over the same batches."""
    logging.getLogger("lightning_dist").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank0 = dist.get_rank() == 0
    task = GptTask(gpt_settings(setup), rank=dist.get_rank(), world_size=dist.get_world_size())
    groups = {
        name: () if name in BASELINES else new_groups(dist.group.WORLD, timeout=_TIMEOUT)
        for name in setup.rows
    }
    for seed, output in zip(setup.seeds, setup.outputs, strict=True):
        runners, refused = [], {}
        for name in setup.rows:
            try:
                runner = Runner(name, task, seed=seed, setup=setup, groups=groups[name])
            except ValueError as error:  # settings, refused on every rank alike
                refused[name] = str(error)
            else:
                runners.append(runner)
        target = race(runners, setup)
        rows = {
            runner.name: {
                "curve": [asdict(point) for point in runner.curve],
                "replicas_identical": same_on_all_ranks(runner.model),
            }
            for runner in runners
        }
        for runner in runners:
            runner.close()
        if rank0:
            numel = sum(p.numel() for p in runners[0].model.parameters())
            text = {"target": target, "parameters": numel, "rows": rows, "refused": refused}
            Path(output).write_text(json.dumps(text))
            print(f"  seed {seed} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def gpt_settings(setup: Settings) -> GptSettings:
    """A constant learning rate after the warm-up: no row's end is known beforehand."""
    return GptSettings(
        steps=setup.steps,
        context=setup.context,
        d_model=setup.d_model,
        n_layers=setup.n_layers,
        n_heads=setup.n_heads,
        batch=setup.batch,
        lr=setup.lr,
        warmup_steps=20,
        final_lr=1.0,
        val_windows=setup.val_windows,
    )


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
