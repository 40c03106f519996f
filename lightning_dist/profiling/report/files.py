"""The files made of a profile, each on its own: one that fails keeps no other away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightning_dist.profiling.analysis.parts import Summary, Timeline
from lightning_dist.profiling.analysis.summarize import pick_steps
from lightning_dist.profiling.report.summary_file import write_csv, write_summary
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
    folder = Path(folder)
    names, problems = [], []
    for name, write in _writers(run, summary, wanted):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder)
            names.append(name)
        except Exception as error:  # the training, and the other files, are worth more
            problems.append(f"{name} not written to {folder}: {_why(error)}")
    return Written(tuple(names), tuple(problems))


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    known = isinstance(error, OSError | ImportError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _writers(
    run: Run, summary: Summary, wanted: Wanted
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """The page and the trace are imported when they are written: plotly takes long."""

    @cache
    def timelines() -> list[Timeline]:
        return pick_steps(run, summary)

    def write_json(folder: Path) -> None:
        write_summary(folder / "summary.json", summary)

    def write_html(folder: Path) -> None:
        from lightning_dist.profiling.report.page import write_report

        write_report(folder / "report.html", summary, timelines())

    def write_perfetto(folder: Path) -> None:
        from lightning_dist.profiling.report.trace import write_trace

        hosts = {rank: each.metadata.host for rank, each in run.ranks.items()}
        write_trace(folder / "trace.json.gz", timelines(), hosts)

    def write_tables(folder: Path) -> None:
        write_csv(folder / "steps.csv", run, summary)

    yield "summary.json", write_json
    if wanted.html:
        yield "report.html", write_html
    if wanted.trace:
        yield "trace.json.gz", write_perfetto
    if wanted.csv:
        yield "steps.csv", write_tables
