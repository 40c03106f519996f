"""Trainings of ranks under CommProfiler, and what is read of their profiles."""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import CommProfiler
from lightning_dist.profiling.analysis.breakdown import analyse
from lightning_dist.profiling.analysis.parts import PARTS
from lightning_dist.profiling.capture.profile_session import Governor
from lightning_dist.profiling.run import Run, read_run

MS = 1e6
STEPS = 12
LIMIT = timedelta(seconds=100)
"""In which rank 0 makes a page; its first one imports plotly."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def ddp(**arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), bucket_cap_mb=0.3, **arguments)


def one_bucket() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(256, 256, bias=False))


def digest(model: nn.Module) -> str:
    return repr([p.double().sum().item() for p in model.parameters()])


def busy(seconds: float) -> None:
    """What a slow rank does; planted, and measured by who plants it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def train(
    model: nn.Module,
    *,
    steps: int = STEPS,
    late: Callable[[int], float] = lambda step: 0.0,
    fails_at: int | None = None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        loss = model(torch.randn(8, 256, generator=generator)).square().mean()
        busy(late(step))
        if step == fails_at:
            raise ArithmeticError("the loss is odd")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def in_detail() -> Iterator[None]:
    """Every step: they are so short that a busy machine records longer than they take."""
    with patch.object(Governor, "spent", lambda governor, nanoseconds, *, of: None):
        yield


@contextmanager
def profiled(model: nn.Module, folder: Path | str, **settings: Any) -> Iterator[CommProfiler]:
    """In detail; without the printed summary and the page unless asked for."""
    settings = {"print_summary": False, "html": False, **settings}
    with in_detail(), CommProfiler(model, dirpath=folder, **settings) as profiler:
        yield profiler


@contextmanager
def printed() -> Iterator[StringIO]:
    """What this rank prints and warns of meanwhile."""
    found = StringIO()
    with redirect_stdout(found), redirect_stderr(found), warnings.catch_warnings():
        warnings.simplefilter("default")
        yield found


def profile(folder: Path, run: int = 0) -> tuple[Run, dict[str, Any]]:
    """What all ranks have left, and rank 0's summary."""
    dist.monitored_barrier(timeout=LIMIT)
    found = folder / f"run-{run}"
    return read_run(found), json.loads((found / "summary.json").read_text())


def require_sums(run: Run) -> None:
    """Parts of every step add up to it."""
    for step in run.common_steps:
        for each in analyse(run, step):
            assert sum(each.parts.values()) == each.duration


def require_parts(run: Run) -> None:
    """They are all there, and add up to the step."""
    require_sums(run)
    for step in run.common_steps:
        for each in analyse(run, step):
            assert set(each.parts) == set(PARTS)
            assert all(value >= 0 for value in each.parts.values())
            assert each.parts["other"] < 0.02 * each.duration


def require_report_of_failure(folder: Path, reason: str) -> None:
    """A training that failed after some steps has a report, which says of what."""
    run, summary = profile(folder)
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.reason.startswith(reason)
    assert 5 <= len(run.ranks[0].steps) <= 9
    assert summary["steps"] > 0
    assert (folder / "run-0" / "report.html").stat().st_size > 1e6


def require_report_without_a_rank(folder: Path, output: str) -> None:
    """One that has not come to the end."""
    run = read_run(folder / "run-0")
    assert list(run.ranks[0].steps) == list(range(STEPS))
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.reason == "finished"
    assert json.loads((folder / "run-0" / "summary.json").read_text())["steps"] > 0
    assert "a rank had terminated or was late at the end, so clocks were not compared" in output
    assert "of the step is exposed communication" in output


def require_no_prediction(folder: Path, reason: str) -> None:
    """Codecs were not measured at the end, and it is said why."""
    _, summary = profile(folder)
    assert summary["predictions"] is None
    found = summary["unavailable"]["predictions"]
    assert found == f"{reason}; `lightning-dist profile whatif DIR` measures"
    assert not (folder / "run-0" / "costs.json").exists()
