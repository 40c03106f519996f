"""One rank of `__main__.py` and of `time_to_accuracy.py`: trains rows over gloo."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.tasks import Task, make_task
from benchmarks.step_time.rank import (
    BASELINES,
    COMPUTE_ROW,
    DDP_ROW,
    DELAY,
    NO_FEEDBACK_SUFFIX,
    attach,
    digest_of,
    tx_bytes_of,
)
from benchmarks.step_time.sharded import (
    ALL_INT8,
    FORM,
    NATIVE,
    compress_all,
    has_replicas,
    is_sharded,
)
from lightning_dist import compress_fsdp, local_updates
from lightning_dist.codecs import resolve_codec
from lightning_dist.integrations.torch.local.outer_steps import LocalUpdates
from lightning_dist.integrations.torch.local.settings import Method, default_codec
from lightning_dist.integrations.torch.networks import Groups, new_groups

_SMOOTHED_OVER = 3  # evaluations: one alone goes up and down by what ten steps gain
_LEEWAY = 1.002  # a loss that differs in the sixth digit must not cost a row a whole block more
TIMEOUT = timedelta(seconds=300)
"""Of groups; long enough for the other ranks to compile their kernels."""


WARM_SHARE = 0.2
"""Of the steps, after which rows with a warm-up begin to compress, and 1-bit Adam freezes."""
WARM_SUFFIX, ONEBIT_PREFIX = "-warm", "onebit-adam:"
LOCAL_MARK = "@"
"""Of rows with local steps: ``diloco@16/int8``, ``diloco@16:outer_lr=1,mixing=0.5/int8``."""
RATE_MARK = "*"
"""Of rows with another learning rate: ``ddp*1.4``."""


@dataclass(frozen=True)
class Job:
    """One row of one task: everything but the seed."""

    task: str
    row: str

    @property
    def codec(self) -> str:
        """A codec of lightning_dist, or one of `BASELINES`."""
        row = self.row.partition(RATE_MARK)[0]
        method, mark, local = row.partition(LOCAL_MARK)
        if mark:
            return local.partition("/")[2] or default_codec(cast(Method, method))
        name = row.removeprefix(f"{FORM}/").removeprefix(f"{DELAY}/")
        name = name.removeprefix(ONEBIT_PREFIX)
        name = "qsgd:bits=8" if name == ALL_INT8 else name
        return name.removesuffix(WARM_SUFFIX).removesuffix(NO_FEEDBACK_SUFFIX)

    @property
    def rate(self) -> float:
        """Factor of the task's learning rate."""
        return float(self.row.partition(RATE_MARK)[2] or 1)

    @property
    def named(self) -> dict[str, Any]:
        """What results say of it."""
        return {"task": self.task, "row": self.row, "codec": self.codec}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained.

    Args:
        jobs: fields of the rows, each of which is trained with every one of ``seeds``.
        tasks: settings of tasks that are not their own, by name of the task.
        interleaved: the jobs of a seed take turns in blocks of steps. Else they follow each other.
        evaluate_every: steps of a block, after which a training is evaluated; None: all of them.
        patience: interleaved jobs whose loss is not that of ddp at its end give up after so many
            times as many steps.
        min_compress_numel: of `compress_ddp`, if a codec has no lower one; None: the codec's own.
        compile_kernels: of `compress_ddp`.
    """

    jobs: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]
    tasks: Mapping[str, Mapping[str, Any]]
    interleaved: bool = False
    evaluate_every: int | None = None
    patience: float = 1.0
    min_compress_numel: int | None = None
    compile_kernels: bool = False


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of every evaluation and the two before it: what is compared with the target."""
    parts = [losses[max(0, i + 1 - _SMOOTHED_OVER) : i + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


class Training:
    """A job with a seed, which decides its first weights and its batches.

    Raises ValueError where `compress_ddp` refuses the settings: on every rank alike.
    """

    def __init__(
        self, task: Task, job: Job, *, seed: int, settings: Settings, groups: Groups
    ) -> None:
        self._began = time.perf_counter()
        torch.manual_seed(seed)
        self.task, self.job, self.seed = task, job, seed
        self.model = task.model()
        self.curve: list[dict[str, Any]] = []
        self.updates: LocalUpdates | None = None
        row = job.row.partition(RATE_MARK)[0]
        is_local = LOCAL_MARK in row
        mesh = _shard(self.model, row) if is_sharded(row) else None
        # As a worker of its own a rank has no DDP around its model.
        bare = is_local or mesh is not None
        self.ddp = self.model if bare else DistributedDataParallel(self.model)
        self._evaluates = dist.get_rank() == 0 or mesh is not None  # who has the whole model
        self._feedback: bool | None = None
        onebit = row.startswith(ONEBIT_PREFIX)
        warm_steps = round(WARM_SHARE * task.settings.steps)
        self._clips = not onebit  # it would clip momenta
        optimizing: dict[str, Any] = {"own_momentum": False, "rate": job.rate}
        if onebit:
            optimizing["freeze_step"] = warm_steps
        options: dict[str, Any] = {}
        if job.codec not in (*BASELINES, NATIVE):
            codec, least = resolve_codec(job.codec), settings.min_compress_numel
            optimizing["own_momentum"] = codec.momentum_correction > 0
            chosen = not row.endswith(NO_FEEDBACK_SUFFIX)
            self._feedback = chosen and codec.keeps_residual and not codec.lossless
            options = {
                # Not above the codec's own limit: casts compress everything, also here.
                "min_compress_numel": None if least is None else min(least, codec.min_numel),
                "start_step": warm_steps if row.endswith(WARM_SUFFIX) else 0,
                "compile_kernels": settings.compile_kernels,
                "groups": groups,
            }
        row = row.removeprefix(ONEBIT_PREFIX).removesuffix(WARM_SUFFIX)
        self._handle = None if bare else attach(self.ddp, row, **options)
        if mesh is not None and job.codec != NATIVE:
            least = options["min_compress_numel"]
            if has_replicas(row):
                sharded = compress_fsdp(self.model, job.codec, mesh=mesh, min_compress_numel=least)
                self._handle = sharded.reducer
            else:
                self._handle = compress_all(self.model, mesh, min_compress_numel=least)
        self._optimizer, self._schedule = task.optimizer(self.model, **optimizing)
        if onebit:
            self._optimizer.attach(self._handle)
        if is_local:
            method, _, every = row.partition("/")[0].partition(LOCAL_MARK)
            every, _, more = every.partition(":")
            chosen_rates = dict(each.split("=") for each in more.split(",") if each)
            del options["start_step"], options["compile_kernels"]
            self.updates = local_updates(
                self.model,
                self._optimizer,
                method=cast(Method, method),
                sync_every=int(every),
                codec=job.codec,
                **{
                    name: int(value) if value.isdigit() else float(value)
                    for name, value in chosen_rates.items()
                },
                **options,
            )
            self._handle = self.updates.reducer
        self._batches = task.batches(seed)

    def run(self, steps: int) -> None:
        """Train on, timed between two barriers, then evaluate, which is not timed."""
        link = os.environ["GLOO_SOCKET_IFNAME"]
        dist.barrier()
        tx_before, began = tx_bytes_of(link), time.perf_counter()
        for _ in range(steps):
            self.step()
        # Else what is under way would use the link in the turns of others.
        waiting: Any = self._handle if self.updates is None else self.updates
        if waiting is not None and has_replicas(self.job.row):
            waiting.wait()
        elapsed = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.barrier()  # now every rank has received what this one sent
        tx = tx_bytes_of(link) - tx_before
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        metrics = [{}]
        if self.job.codec != COMPUTE_ROW:  # its replicas do not learn together
            anchor = self.updates.anchor_weights() if self.updates else contextlib.nullcontext()
            with anchor:
                if self._evaluates:
                    metrics = [self.task.evaluate(self.model)]
            dist.broadcast_object_list(metrics)
        last = self.curve[-1] if self.curve else {"step": 0, "seconds": 0.0, "tx_bytes": 0}
        self.curve.append(
            {
                "step": last["step"] + steps,
                "seconds": last["seconds"] + elapsed.item(),
                "tx_bytes": last["tx_bytes"] + tx,
                **metrics[0],
            }
        )

    def losses(self) -> list[float]:
        """Smoothed validation losses, one for each evaluation; none without communication."""
        return smoothed([point["val_loss"] for point in self.curve if "val_loss" in point])

    def end(self) -> dict[str, Any]:
        """Close the reducer; what came of the training. Collective."""
        if self.updates is not None:
            self.updates.start_from_anchor()
        identical = same_on_all_ranks(self.model) if has_replicas(self.job.row) else None
        ratio = 1.0
        if self._handle is not None:
            ratio = self._handle.comm_stats()["ratio"]
            if self.updates is not None:  # of one exchange, and DDP has one in every step
                ratio *= self.updates.schedule.sync_every
            self._handle.close()
        return {
            "curve": self.curve,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "error_feedback": self._feedback,
            "bytes_ratio": ratio,
            "identical": identical,
            "seconds": time.perf_counter() - self._began,
        }

    def step(self) -> None:
        """One step, with the exchange that follows it."""
        silent: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.job.codec == COMPUTE_ROW:
            silent = cast(DistributedDataParallel, self.ddp).no_sync()
        self._optimizer.zero_grad()
        with silent:
            self.task.loss(self.ddp, next(self._batches)).backward()
        if self._clips:
            self.task.before_step(self.model)
        self._optimizer.step()
        self._schedule.step()
        if self.updates is not None:
            self.updates.step()


def _shard(model: nn.Module, row: str) -> DeviceMesh:
    """Shard ``model`` over all ranks, or one dimension of the mesh (2 replicas, their shards)."""
    if not has_replicas(row):
        everyone = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=everyone)
        return everyone
    shape = 2, dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh if row == f"{FORM}/{NATIVE}" else mesh["shard"])
    return mesh


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether every rank holds the same parameters, bit by bit. Collective."""
    mine = torch.tensor([digest_of(model)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(bool(other == mine) for other in everyone)


def race(trainings: Sequence[Training], settings: Settings) -> float | None:
    """Blocks of all trainings in turn, another one first in every round; the target loss.

    It is the loss of ddp at its end, if that runs along: the others go on until they have it.
    """
    steps = trainings[0].task.settings.steps
    every = settings.evaluate_every or steps
    rounds = steps // every
    ddp = next((each for each in trainings if each.job.codec == DDP_ROW), None)
    for index in range(rounds):
        first = index % len(trainings)
        for training in [*trainings[first:], *trainings[:first]]:
            training.run(every)
        if ddp and settings.interleaved:
            print(f"  step {ddp.curve[-1]['step']}: ddp at {ddp.losses()[-1]:.3f}", flush=True)
    if ddp is None or not ddp.losses():
        return None
    target = ddp.losses()[-1] * _LEEWAY
    for _ in range(round(rounds * (settings.patience - 1))):
        for training in trainings:
            # The loss is the same number on all ranks. Without communication there is none.
            if training.losses() and not min(training.losses()) <= target:
                training.run(every)
    return target


def train(**given: Any) -> Iterator[dict[str, Any]]:
    """Every job with every seed: its curve and what came of it, or why it was refused."""
    settings = Settings(**given)
    # That compression does not pay on a loopback is no news here.
    logging.getLogger("lightning_dist").setLevel(logging.ERROR)
    jobs = [Job(**job) for job in settings.jobs]
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    tasks = {
        name: make_task(name, settings.tasks.get(name, {}), **place)
        for name in {job.task for job in jobs}
    }
    heats = [[(job, seed)] for job in jobs for seed in settings.seeds]
    if settings.interleaved:
        heats = [[(job, seed) for job in jobs] for seed in settings.seeds]
    # Once for all runs: a gloo group that is destroyed right after its last collective may hang.
    groups = [new_groups(dist.group.WORLD, timeout=TIMEOUT) for _ in heats[0]]
    for heat in heats:
        trainings = []
        for (job, seed), own in zip(heat, groups, strict=True):
            try:
                training = Training(tasks[job.task], job, seed=seed, settings=settings, groups=own)
            except ValueError as error:
                yield {**job.named, "seed": seed, "reason": str(error)}
            else:
                trainings.append(training)
        if trainings:
            target = race(trainings, settings)
            for each in trainings:
                yield {**each.job.named, "seed": each.seed, **each.end(), "target": target}
