"""Small trainings with Accelerate, and what tests do to their checkpoints."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn

from lightning_dist import compress_ddp
from lightning_dist.accelerate import Accelerator, AsyncStateCheckpointer, CompressedDDPPlugin
from scenarios.fitting import digest, parameters
from scenarios.models import Regression, loader

Facts = dict[str, Any]
TOPK = CompressedDDPPlugin("topk:ratio=0.1", min_compress_numel=0)


class Tally:
    """What a rank has seen, which no other rank knows."""

    def __init__(self) -> None:
        self.seen = 0.0

    def state_dict(self) -> Facts:
        return {"seen": self.seen}

    def load_state_dict(self, state: Facts) -> None:
        self.seen = state["seen"]


def forget_accelerators() -> None:
    """As in a new process, of which accelerate's state is."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """Models under Accelerate, trained step by step on rank-dependent data.

    Args:
        plugin: None for plain DDP.
        by_hand: attach it to Accelerate's own Accelerator.
        attach: called with that Accelerator before it prepares anything.
        models: how many, or these.
    """

    def __init__(
        self,
        plugin: CompressedDDPPlugin | None = TOPK,
        *,
        by_hand: bool = True,
        attach: Callable[[Any], object] = lambda accelerator: None,
        handlers: Sequence[Any] = (),
        scaler: Any = None,
        models: int | Sequence[nn.Module] = 1,
        optimizer: Any = torch.optim.SGD,
        **arguments: Any,
    ) -> None:
        forget_accelerators()
        given = {"cpu": True, **arguments}
        if by_hand:
            self.accelerator = accelerate.Accelerator(kwargs_handlers=list(handlers), **given)
            self.compression = None if plugin is None else plugin.attach(self.accelerator)
        else:
            self.accelerator = Accelerator(kwargs_handlers=[*handlers, plugin], **given)
            self.compression = self.accelerator.compression
        attach(self.accelerator)
        if scaler is not None:
            self.accelerator.scaler = scaler  # Accelerate makes one on GPUs only
        if isinstance(models, int):
            models = [Regression(hidden=256).net for _ in range(models)]
        steps = [optimizer(model.parameters(), lr=0.1) for model in models]
        prepared = self.accelerator.prepare(*models, *steps)
        self.models, self.optimizers = prepared[: len(models)], prepared[len(models) :]
        self.batches = iter(own_batches() * 2)
        self.digests: list[str] = []

    def train(self, batches: int) -> None:
        for _ in range(batches):
            x, y = next(self.batches)
            with self.accelerator.accumulate(*self.models):
                loss = sum(nn.functional.mse_loss(model(x), y) for model in self.models)
                self.accelerator.backward(loss)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.digests.append("".join(map(digest, self.models)))

    def facts(self) -> Facts:
        ours = self.compression is not None
        reducers = self.compression.reducers if ours else []
        return {
            "parameters": {
                f"{index}.{name}": value
                for index, model in enumerate(self.models)
                for name, value in parameters(self.accelerator.unwrap_model(model)).items()
            },
            "digests": self.digests,
            "stats": dict(self.compression.comm_stats()[0]) if ours else None,
            "residuals": {
                f"{index}.{name}": reducer.residuals[name].clone()
                for index, reducer in enumerate(reducers)
                for name in reducer.residuals
            },
            "step": [reducer.step for reducer in reducers],
        }

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.compression is not None:
            self.compression.close()
        forget_accelerators()


def own_batches() -> list[Any]:
    """Eight of this rank."""
    return list(loader(8))[dist.get_rank() :: dist.get_world_size()]


class Training:
    """One whose every state counts: optimizer, schedule, random numbers of three libraries, a
    registered object of every rank, and residuals where there are several ranks.

    It is made alike every time; what differs from rank to rank is drawn from its random numbers.

    Args:
        project: where there is one, checkpoints are named by Accelerate.
    """

    def __init__(self, project: Path | None, *, seed: int = 0, **arguments: Any) -> None:
        forget_accelerators()
        naming = {"project_dir": str(project), "automatic_checkpoint_naming": True}
        config = ProjectConfiguration(**(naming if project else {}), **arguments)
        self.accelerator = accelerate.Accelerator(cpu=True, project_config=config)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.2), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )
        self.tally = Tally()
        self.accelerator.register_for_checkpointing(self.tally)
        self.reducer = None
        if self.accelerator.num_processes > 1:
            self.reducer = compress_ddp(
                self.model, "topk:ratio=0.1,block_size=64", min_compress_numel=0
            )
        own = 100 * seed + self.accelerator.process_index
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own)

    def train(self, steps: int) -> list[float]:
        """What the registered object holds after each step: it depends on everything before."""
        history = []
        for _ in range(steps):
            batch = torch.randn(6, 12) * random.random() + float(np.random.rand())
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.tally.seen += loss.item()
            history.append(self.tally.seen)
        return history

    def facts(self) -> Facts:
        adam = self.optimizer.state_dict()["state"]
        owed = {} if self.reducer is None else self.reducer.residuals
        return {
            "parameters": parameters(self.accelerator.unwrap_model(self.model)),
            "optimizer": {f"{i}.{key}": v.clone() for i, s in adam.items() for key, v in s.items()},
            "residuals": {name: owed[name].clone() for name in owed},
            "rate": self.schedule.get_last_lr()[0],
            "seen": self.tally.seen,
            "drawn": [torch.rand(()).item(), random.random(), float(np.random.rand())],
        }

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self.reducer is not None:
            self.reducer.close()
        forget_accelerators()


@contextmanager
def saving(
    project: Path | None, *, seed: int = 0, total_limit: int | None = None, **options: Any
) -> Iterator[tuple[AsyncStateCheckpointer, Training]]:
    with (
        Training(project, seed=seed, total_limit=total_limit) as training,
        AsyncStateCheckpointer(training.accelerator, **options) as state,
    ):
        yield state, training


def names(project: Path) -> list[str]:
    """The checkpoints that can be seen."""
    found = os.listdir(project / "checkpoints")
    return sorted(name for name in found if not name.startswith("."))


def writers() -> list[int]:
    """Writer processes of this process."""
    tasks = Path("/proc/self/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [pid for pid in children if b"disk.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def no_room(nbytes: int, *, pid: int = 0) -> Iterator[None]:
    """Let a process, this one by default, write no more than ``nbytes`` to a file."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def damage(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
