"""Planted runs whose steps are changed, as files, and what holds for the parts of any step."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from planted import bare, replaced

from lightning_dist.profiling.analysis.breakdown import Analysed
from lightning_dist.profiling.analysis.parts import PARTS
from lightning_dist.profiling.capture.events import Record, StepRecord
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.run import RankRun, Run


def changed(run: Run, change: Callable[[StepRecord], StepRecord], *ranks: int) -> Run:
    """``run``, where every step of ``ranks``, or of all, is what ``change`` makes of it."""
    for rank in ranks or run.ranks:
        steps = {step: change(each) for step, each in run.ranks[rank].steps.items()}
        run = replaced(run, rank, steps=steps)
    return run


def coarse(run: Run, rank: int, *steps: int) -> Run:
    """``run``, where a rank has not recorded ``steps``, or any, in detail."""
    only_timed = bare(run, steps or range(99), buckets=(), spans=(), detailed=False)
    return replaced(run, rank, steps=only_timed.ranks[rank].steps)


def records_of(rank: RankRun) -> list[Record]:
    end = [] if rank.end is None else [rank.end]
    return [rank.metadata, *rank.clocks, *rank.steps.values(), *rank.errors, *rank.links, *end]


def write(folder: Path, ranks: Iterable[RankRun]) -> None:
    """A file for each of ``ranks``."""
    for each in ranks:
        file = RankFile(folder, rank=each.metadata.rank)
        file.write(records_of(each))
        file.close()


def phases_of(step: Any, *, unit: int = 1) -> str:
    """Such as ``forward 2-22, backward 22-42``."""
    return ", ".join(f"{p.name} {p.begin // unit}-{p.end // unit}" for p in step.phases)


def check_identities(parts: Analysed) -> None:
    assert tuple(parts.parts) == PARTS
    assert sum(parts.parts.values()) == parts.duration
    assert min(parts.parts.values()) >= 0
    ns = parts.ns
    assert ns["hidden"] + ns["exposed_wait"] + ns["exposed_transfer"] == ns["exchange"]
