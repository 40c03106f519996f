"""One rank of `whatif.py`: trains with every setting in turn, each under a profile.

Settings take turns step by step, so that what else the machine does is the same for all. Reads its
settings from the command line as JSON; the profile of every setting goes to a folder of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.step_time.rank import Row
from benchmarks.step_time.rows import WIDTH
from lightning_dist.integrations.profile_run import ProfileRun
from lightning_dist.profiling.capture.session import SessionSettings
from lightning_dist.reducer.calibration import calibrate

_CHUNKS = 24  # of a megabyte: about what the gradients of the model take
_TIMEOUT = timedelta(seconds=300)  # long enough for the other ranks to compile their kernels


@dataclass(kw_only=True)
class Settings:
    """What the launcher tells every rank."""

    rows: list[str]
    folders: list[str]  # one for every row
    codecs: list[str]  # whose costs are to be measured
    costs: str  # path of what was found
    steps: int
    batch: int
    seed: int


class Turn:
    """A model, what communicates for it, and the profile of its steps and of nothing else."""

    def __init__(self, name: str, folder: Path, *, seed: int) -> None:
        self.row = Row(name, seed=seed)
        self.profile = ProfileRun(
            self.row.ddp, parent=folder, settings=SessionSettings(max_overhead=1.0)
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step."""
        dist.barrier()
        self.profile.exclude_interval()  # the turns of others are no part of it
        self.row.step(inputs, targets)
        self.profile.exclude_interval()
        self.row.forget()

    def close(self) -> None:
        """Let go of everything."""
        self.profile.close("finished", together=True)
        if self.row.handle is not None:
            self.row.handle.close()


def measure_costs(settings: Settings) -> None:
    """What codecs cost where all ranks use them at once, as they do in a step."""
    dist.barrier()
    costs = calibrate(settings.codecs, fused=True, chunks=_CHUNKS)
    if dist.get_rank() == 0:
        listed = {name: asdict(cost) for name, cost in costs.items()}
        Path(settings.costs).write_text(json.dumps(listed))


def run(settings: Settings) -> None:
    """All of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    measure_costs(settings)
    turns = []
    for name, folder in zip(settings.rows, settings.folders, strict=True):
        turns.append(Turn(name, Path(folder), seed=settings.seed))
        dist.barrier()
    torch.manual_seed(settings.seed + 1 + dist.get_rank())
    inputs, targets = (torch.randn(settings.batch, WIDTH) for _ in range(2))
    for number in range(settings.steps):
        first = number % len(turns)
        for turn in turns[first:] + turns[:first]:
            turn.step(inputs, targets)
        if dist.get_rank() == 0:
            print(f"  step {number + 1} of {settings.steps}", flush=True)
    for turn in turns:
        turn.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
