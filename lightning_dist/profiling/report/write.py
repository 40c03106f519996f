"""The files that are made of a profile, each on its own: one that fails keeps no other away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.profiling.folder import Run
from lightning_dist.profiling.parts import Summary
from lightning_dist.profiling.report.csv_files import write_csv
from lightning_dist.profiling.report.summary_file import write_summary
from lightning_dist.profiling.report.trace import write_trace
from lightning_dist.profiling.summarize import pick_steps


@dataclass(frozen=True)
class Wanted:
    """Which files, beside ``summary.json``.

    Args:
        html: ``report.html``.
        trace: ``trace.json.gz``.
        csv: ``steps.csv`` and ``buckets.csv``.
    """

    html: bool = True
    trace: bool = False
    csv: bool = False


@dataclass(frozen=True)
class Written:
    """What has become of the files.

    Args:
        names: of those that are there now.
        problems: a sentence for each that is not.
    """

    names: tuple[str, ...]
    problems: tuple[str, ...]


def write_files(folder: str | Path, run: Run, summary: Summary, *, wanted: Wanted) -> Written:
    """Make them in ``folder``."""
    folder = Path(folder)
    names, problems = [], []
    for name, write in _writers(run, summary, wanted):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder)
            names.append(name)
        except (OSError, ImportError) as error:
            why = getattr(error, "strerror", None) or str(error)
            problems.append(f"{name} not written to {folder}: {why}")
    return Written(tuple(names), tuple(problems))


def _writers(
    run: Run, summary: Summary, wanted: Wanted
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    yield "summary.json", lambda folder: write_summary(folder / "summary.json", summary)
    timelines = pick_steps(run, summary) if wanted.html or wanted.trace else []
    if wanted.html:

        def write_html(folder: Path) -> None:
            from lightning_dist.profiling.report.html import write_report  # plotly

            write_report(folder / "report.html", summary, timelines)

        yield "report.html", write_html
    if wanted.trace:
        hosts = {rank: each.about.host for rank, each in run.ranks.items()}
        yield (
            "trace.json.gz",
            lambda folder: write_trace(folder / "trace.json.gz", timelines, hosts),
        )
    if wanted.csv:
        yield "steps.csv, buckets.csv", lambda folder: write_csv(folder, run, summary)
