"""The files that are made of a profile, each on its own: one that fails keeps no other away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.profiling.analysis.parts import Summary, Timeline
from lightning_dist.profiling.analysis.summarize import pick_steps
from lightning_dist.profiling.report.summary_file import write_csv, write_summary
from lightning_dist.profiling.report.trace import write_trace
from lightning_dist.profiling.run import Run


@dataclass(frozen=True)
class Wanted:
    """Which files, beside ``summary.json``.

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
    yield "summary.json", lambda folder: write_summary(folder / "summary.json", summary)
    picked: list[Timeline] = []  # by the first that needs them, so that what fails is its own

    def timelines() -> list[Timeline]:
        if not picked:
            picked.extend(pick_steps(run, summary))
        return picked

    if wanted.html:

        def write_html(folder: Path) -> None:
            from lightning_dist.profiling.report.html import write_report  # plotly

            write_report(folder / "report.html", summary, timelines())

        yield "report.html", write_html
    if wanted.trace:
        hosts = {rank: each.about.host for rank, each in run.ranks.items()}
        yield (
            "trace.json.gz",
            lambda folder: write_trace(folder / "trace.json.gz", timelines(), hosts),
        )
    if wanted.csv:
        yield "steps.csv", lambda folder: write_csv(folder / "steps.csv", run, summary)
