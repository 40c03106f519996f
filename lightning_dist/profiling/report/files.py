"""The files made of a profile, each on its own: one that fails keeps no other away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightning_dist.profiling.analysis.parts import Summary, Timeline
from lightning_dist.profiling.analysis.summarize import pick_steps
from lightning_dist.profiling.report.summary_file import write_csv, write_summary
from lightning_dist.profiling.report.trace import write_trace
from lightning_dist.profiling.run import Run


@dataclass(frozen=True)
class Wanted:
    """Files to write beside ``summary.json``.

    Args:
        html: ``report.html``.
        trace: ``trace.json.gz``.
        csv: ``steps.csv``.
    """

    html: bool = True
    trace: bool = False
    csv: bool = False


@dataclass(frozen=True)
class Written:
    """Names of the files that were written, and a sentence for each that was not."""

    names: tuple[str, ...]
    problems: tuple[str, ...]


def write_files(folder: str | Path, run: Run, summary: Summary, *, wanted: Wanted) -> Written:
    """Write the files that are wanted to ``folder``."""

    @cache
    def timelines() -> list[Timeline]:
        return pick_steps(run, summary)

    def write_page(path: Path) -> None:
        from lightning_dist.profiling.report.page import write_report  # imports plotly, slowly

        write_report(path, summary, timelines())

    hosts = {rank: each.metadata.host for rank, each in run.ranks.items()}
    writers: dict[str, tuple[bool, Callable[[Path], None]]] = {
        "summary.json": (True, lambda path: write_summary(path, summary)),
        "report.html": (wanted.html, write_page),
        "trace.json.gz": (wanted.trace, lambda path: write_trace(path, timelines(), hosts)),
        "steps.csv": (wanted.csv, lambda path: write_csv(path, run, summary)),
    }
    names, problems = [], []
    for name, (is_wanted, write) in writers.items():
        try:
            if is_wanted:
                Path(folder).mkdir(parents=True, exist_ok=True)
                write(Path(folder) / name)
                names.append(name)
        except Exception as error:  # the training, and the other files, are worth more
            problems.append(f"{name} not written to {folder}: {_why(error)}")
    return Written(tuple(names), tuple(problems))


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    known = isinstance(error, OSError | ImportError)
    return str(error) if known else f"{type(error).__name__}: {error}"
