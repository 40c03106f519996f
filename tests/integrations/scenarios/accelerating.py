"""A small training with Accelerate whose every state counts: optimizer, schedule, random numbers of
three libraries, a registered object of every rank, and residuals where there are several ranks.
"""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn

from lightning_dist import compress_ddp
from lightning_dist.accelerate import AsyncStateCheckpointer

Facts = dict[str, Any]


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


def accelerator(project: Path | None, **arguments: Any) -> Accelerator:
    """Names checkpoints by itself where there is a project folder."""
    forget_accelerators()
    naming = {"project_dir": str(project), "automatic_checkpoint_naming": True} if project else {}
    return Accelerator(cpu=True, project_config=ProjectConfiguration(**naming, **arguments))


class Training:
    """Made alike every time; what differs from rank to rank is drawn from its random numbers."""

    def __init__(self, project: Path | None, *, seed: int = 0, **arguments: Any) -> None:
        self.accelerator = accelerator(project, **arguments)
        self.rank = self.accelerator.process_index
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
        own = 100 * seed + self.rank
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
        plain = self.accelerator.unwrap_model(self.model)
        owed = None if self.reducer is None else self.reducer.residuals
        return {
            "parameters": {name: p.detach().clone() for name, p in plain.named_parameters()},
            "optimizer": {f"{i}.{key}": v.clone() for i, s in adam.items() for key, v in s.items()},
            "residuals": {} if owed is None else {n: owed[n].clone() for n in owed},
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


def names(project: Path) -> list[str]:
    """The checkpoints that can be seen."""
    found = os.listdir(project / "checkpoints")
    return sorted(name for name in found if not name.startswith("."))


def writers() -> list[int]:
    """Writer processes of this process."""
    tasks = Path("/proc/self/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [pid for pid in children if b"disk.service" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def writer_of(state: AsyncStateCheckpointer) -> int:
    """The writer process of ``state``, which has saved something then."""
    state.save_state()
    state.wait()
    (writer,) = writers()
    return writer


def kill_writer_during_a_save(state: AsyncStateCheckpointer) -> None:
    """The second one."""
    writer = writer_of(state)
    os.kill(writer, signal.SIGSTOP)
    state.save_state()
    os.kill(writer, signal.SIGKILL)


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
