"""One rank of `__main__.py` and of `time_to_accuracy.py`: trains rows over gloo."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.convergence.tasks import Task, make_task
from benchmarks.harness.rows import COMPUTE_ROW, DDP_ROW, Row, RowName, digest_of, rotated, timed
from lightning_dist.codecs import resolve_codec
from lightning_dist.sync.base import Groups
from lightning_dist.sync.networks import new_groups

_SMOOTHED_OVER = 3  # evaluations: one alone goes up and down by what ten steps gain
_LEEWAY = 1.002  # a loss that differs in the sixth digit must not cost a row a whole block more
TIMEOUT = timedelta(seconds=300)
"""Of groups; long enough for the other ranks to compile their kernels."""

WARM_SHARE = 0.2
"""Of the steps, after which rows with a warm-up begin to compress, and 1-bit Adam freezes."""


Job = tuple[str, str]
"""A task and a row: everything of a training but the seed."""


def named(job: Job) -> dict[str, str]:
    """What results say of it."""
    task, row = job
    return {"task": task, "row": row, "codec": RowName.parse(row).codec}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained.

    Args:
        jobs: each of which is trained with every one of ``seeds``.
        tasks: settings of tasks that are not their own, by name of the task.
        interleaved: the jobs of a seed take turns in blocks of steps. Else they follow each other.
        evaluate_every: steps of a block, after which a training is evaluated; None: all of them.
        patience: interleaved jobs whose loss is not that of ddp at its end give up after so many
            times as many steps.
        min_compress_numel: of `compress_ddp`, if a codec has no lower one; None: the codec's own.
        compile_kernels: of `compress_ddp`.
    """

    jobs: Sequence[Job]
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
    """A row with a seed, which decides its first weights and its batches.

    Raises ValueError where `compress_ddp` refuses the settings: on every rank alike.
    """

    def __init__(
        self, task: Task, row: str, *, seed: int, settings: Settings, groups: Groups | None
    ) -> None:
        self._began = time.perf_counter()
        torch.manual_seed(seed)
        self.task, self.seed = task, seed
        self.curve: list[dict[str, Any]] = []
        name = RowName.parse(row)
        warm_steps = round(WARM_SHARE * task.settings.steps)
        optimizing: dict[str, Any] = {"own_momentum": False, "rate": name.rate}
        if name.onebit:
            optimizing["freeze_step"] = warm_steps
        options: dict[str, Any] = {}
        self._feedback: bool | None = None
        if not name.is_torch:
            codec, least = resolve_codec(name.codec), settings.min_compress_numel
            optimizing["own_momentum"] = codec.momentum_correction > 0
            self._feedback = name.feedback and codec.keeps_residual and not codec.lossless
            options = {
                # Not above the codec's own limit: casts compress everything, also here.
                "min_compress_numel": None if least is None else min(least, codec.min_numel),
                "start_step": warm_steps if name.warm else 0,
                "compile_kernels": settings.compile_kernels,
                "groups": groups,
            }

        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            found, self._schedule = task.optimizer(model, **optimizing)
            return found

        self.model = task.model()
        shards = max(1, dist.get_world_size() // 2)
        self.row = Row(row, self.model, optimizer, shards=shards, **options)
        self._batches = task.batches(seed)

    def run(self, steps: int) -> None:
        """Train on, timed between two barriers, then evaluate, which is not timed."""

        def block() -> None:
            self.steps(steps)
            # Else what is under way would use the link in the turns of others.
            if waiting := self.row.updates or self.row.reducer:
                waiting.wait()

        elapsed, tx = timed(block)
        metrics = [{}]
        if self.row.text != COMPUTE_ROW:  # its replicas do not learn together
            updates = self.row.updates
            with updates.anchor_weights() if updates else contextlib.nullcontext():
                # All ranks of a sharded model hold the whole only together.
                if dist.get_rank() == 0 or self.row.is_sharded:
                    metrics = [self.task.evaluate(self.model)]
            dist.broadcast_object_list(metrics)
        last = self.curve[-1] if self.curve else {"step": 0, "seconds": 0.0, "tx_bytes": 0}
        self.curve.append(
            {
                "step": last["step"] + steps,
                "seconds": last["seconds"] + elapsed,
                "tx_bytes": last["tx_bytes"] + tx,
                **metrics[0],
            }
        )

    def losses(self) -> list[float]:
        """Smoothed validation losses, one for each evaluation; none without communication."""
        return smoothed([point["val_loss"] for point in self.curve if "val_loss" in point])

    def end(self) -> dict[str, Any]:
        """Close the reducer; what came of the training. Collective."""
        if self.row.updates is not None:
            self.row.updates.start_from_anchor()
        identical = None if self.row.name.all_ranks else same_on_all_ranks(self.model)
        ratio = 1.0
        if self.row.handle is not None:
            ratio = self.row.handle.comm_stats()["ratio"]
            # Of one exchange, and DDP has one in every step.
            ratio *= self.row.name.local.get("sync_every", 1)
        self.row.close()
        return {
            "curve": self.curve,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "error_feedback": self._feedback,
            "bytes_ratio": ratio,
            "identical": identical,
            "seconds": time.perf_counter() - self._began,
        }

    def steps(self, count: int) -> None:
        """So many steps, one after the other."""
        for _ in range(count):
            self.step()

    def step(self) -> None:
        """One step, with the exchange that follows it."""
        self.row.optimizer.zero_grad()
        batch = next(self._batches)
        self.row.backward(lambda model: self.task.loss(model, batch))
        if not self.row.name.onebit:  # it would clip momenta
            self.task.before_step(self.model)
        self.row.optimizer.step()
        self._schedule.step()
        if self.row.updates is not None:
            self.row.updates.step()


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
    ddp = next((each for each in trainings if each.row.text == DDP_ROW), None)
    for index in range(rounds):
        for training in rotated(trainings, index):
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
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    tasks = {
        name: make_task(name, settings.tasks.get(name, {}), **place)
        for name in {task for task, _ in settings.jobs}
    }
    heats = [[(job, seed)] for job in settings.jobs for seed in settings.seeds]
    if settings.interleaved:
        heats = [[(job, seed) for job in settings.jobs] for seed in settings.seeds]
    # Once for all runs: a gloo group that is destroyed right after its last collective may hang.
    groups = [new_groups(dist.group.WORLD, timeout=TIMEOUT) for _ in heats[0]]
    for heat in heats:
        trainings = {}
        for (job, seed), own in zip(heat, groups, strict=True):
            task, row = job
            try:
                training = Training(tasks[task], row, seed=seed, settings=settings, groups=own)
            except ValueError as error:
                yield {**named(job), "seed": seed, "reason": str(error)}
            else:
                trainings[tuple(job)] = training
        if trainings:
            target = race([*trainings.values()], settings)
            for job, each in trainings.items():
                yield {**named(job), "seed": each.seed, **each.end(), "target": target}
