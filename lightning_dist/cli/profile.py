"""``lightning-dist profile``: look at where communication time went, and compare runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_dist.cli.errors import BAD_INPUT, line_of, reported
from lightning_dist.cli.profile_table import describe, print_differences
from lightning_dist.profiling.compare import Difference, compare, measured, verdict
from lightning_dist.profiling.folder import Run, read_run
from lightning_dist.profiling.parts import SCHEMA, Summary
from lightning_dist.profiling.report.csv_files import write_csv
from lightning_dist.profiling.report.summary_file import to_json, write_summary
from lightning_dist.profiling.report.trace import write_trace
from lightning_dist.profiling.summarize import pick_steps, summarize
from lightning_dist.profiling.terminal import print_summary

app = typer.Typer(no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.callback()
def _profile() -> None:
    """Look at where communication time went, and compare runs."""


@app.command("report")
@reported
def report_command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="What CommProfiler has written.")],
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write report.html.")] = True,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write trace.json.gz, for ui.perfetto.dev.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Write steps.csv and buckets.csv.")] = False,
    as_json: Json = False,
    out: Annotated[
        str | None, typer.Option(metavar="DIR2", help="Write there, and not into DIR.")
    ] = None,
) -> None:
    """Print what a profile says, and make its files anew from the lines of all ranks.

    Writes summary.json and report.html into DIR. Where that cannot be, the summary is still
    printed; exit code 2 then if --out, --trace or --csv had asked for files.
    """
    run = read_run(folder)
    summary = summarize(run)
    if as_json:
        typer.echo(to_json(summary.as_dict()))
    else:
        print_summary(summary)
    target = Path(folder if out is None else out)
    written, failed = [], False
    for names, write in _writers(run, summary, html=html, trace=trace, csv=csv):
        try:
            target.mkdir(parents=True, exist_ok=True)
            write(target)
            written.append(names)
        except (OSError, ImportError) as error:
            why = getattr(error, "strerror", None) or line_of(error)
            typer.echo(f"lightning-dist: {names} not written to {target}: {why}", err=True)
            failed = True
    if written and not as_json:
        typer.echo(f"written to {target}: {', '.join(written)}")
    if failed and (out is not None or trace or csv):
        raise typer.Exit(BAD_INPUT)


def _writers(
    run: Run, summary: Summary, *, html: bool, trace: bool, csv: bool
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Names of files, and what writes them into a folder."""
    yield "summary.json", lambda folder: write_summary(folder / "summary.json", summary)
    timelines = pick_steps(run, summary) if html or trace else []
    if html:

        def write_html(folder: Path) -> None:
            from lightning_dist.profiling.report.html import write_report  # plotly

            write_report(folder / "report.html", summary, timelines)

        yield "report.html", write_html
    if trace:
        hosts = {rank: each.about.host for rank, each in run.ranks.items()}
        yield (
            "trace.json.gz",
            lambda folder: write_trace(folder / "trace.json.gz", timelines, hosts),
        )
    if csv:
        yield "steps.csv, buckets.csv", lambda folder: write_csv(folder, run, summary)


@app.command("compare")
@reported
def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder of one run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Folder of the other.")],
    as_json: Json = False,
) -> None:
    """Put two runs beside each other: step time, its parts, bytes.

    Medians over steps. The spread is what two runs of the same may differ by: the notches of both
    together, 1.58 quartile distances by the root of the number of steps each.
    """
    runs = {"A": (a, *_summary_of(a)), "B": (b, *_summary_of(b))}
    found = compare(*(measured(run, summary) for _, run, summary in runs.values()))
    if as_json:
        sides = {
            name.lower(): {"folder": folder, "run": summary.run, "steps": summary.steps}
            for name, (folder, _, summary) in runs.items()
        }
        rows = [_fields(each) for each in found]
        content = {"schema": SCHEMA, "verdict": verdict(found), **sides, "differences": rows}
        typer.echo(to_json(content))
        return
    for name, (folder, _, summary) in runs.items():
        typer.echo(f"{name}: {folder} ({describe(summary)})")
    typer.echo(verdict(found))
    print_differences(found)
    for name, (_, _, summary) in runs.items():
        for note in summary.notes:
            typer.echo(f"note: {name}: {note}")


def _summary_of(folder: str) -> tuple[Run, Summary]:
    run = read_run(folder)
    return run, summarize(run)


def _fields(each: Difference) -> dict[str, Any]:
    return {**vars(each), "difference": each.difference, "is_explained": each.is_explained}
