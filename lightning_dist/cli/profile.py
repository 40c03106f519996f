"""``lightning-dist profile``: look at where communication time went, compare runs, and predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lightning_dist.base.console import print_lines, print_table
from lightning_dist.cli.errors import BAD_INPUT, reported
from lightning_dist.cli.profile_whatif import run_of, whatif_command
from lightning_dist.profiling.analysis.compare import Difference, compare, measured, verdict
from lightning_dist.profiling.analysis.metrics import METRICS, MISSING, count, format_value
from lightning_dist.profiling.analysis.parts import PARTS, SCHEMA, Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.files import to_json, write_files
from lightning_dist.profiling.report.terminal import print_summary
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.costs import read_costs
from lightning_dist.profiling.whatif.predict import with_whatif

app = typer.Typer(no_args_is_help=True, help="Report, compare and predict communication time.")

Folder = Annotated[str, typer.Argument(metavar="DIR", help="Folder that CommProfiler has written.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("report")
@reported
def report_command(
    folder: Folder,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write report.html.")] = True,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write trace.json.gz, for ui.perfetto.dev.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Write steps.csv.")] = False,
    as_json: Json = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR2", help="Write the files into this folder instead of DIR."),
    ] = None,
) -> None:
    """Print the summary of a profile, and rebuild its files.

    Reads the raw events of all ranks, writes summary.json and report.html into DIR. If that fails
    the summary is still printed; exit code 2 if --out, --trace or --csv asked for files. Exit code
    2 too if no step was recorded, with the reason.

    \b
      lightning-dist profile report comm_profile/run-0
      lightning-dist profile report comm_profile/run-0 --trace --csv --out report/
    """
    folder = run_of(folder)
    run = read_run(folder)
    summary = with_whatif(summarize(run), run, lambda observed: read_costs(folder))
    if as_json:
        typer.echo(to_json(summary.as_dict()))
    else:
        print_summary(summary)
    target = Path(folder if out is None else out)
    done = write_files(target, run, summary, html=html, trace=trace, csv=csv)
    for problem in done.problems:
        typer.echo(f"lightning-dist: {problem}", err=True)
    if done.names and not as_json:
        typer.echo(f"written to {target}: {', '.join(done.names)}")
    _require_steps({folder: summary})
    if done.problems and (out is not None or trace or csv):
        raise typer.Exit(BAD_INPUT)


@app.command("compare")
@reported
def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder of one run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Folder of the other.")],
    as_json: Json = False,
) -> None:
    """Compare two runs: step time, its parts, bytes.

    Values are medians over the steps recorded in detail ("all steps": over all) of the mean over
    ranks; those of `report` are means. `report` names the rank that others wait for.

    The spread is the difference that chance may make between two runs of the same training: ignore
    smaller differences. It falls with the number of steps. (Of each run 1.58 times the
    interquartile range of its steps over the square root of their number; the sum of both.)

    Exit code 2 if one of them has no step, with the reason.

    \b
      lightning-dist profile compare comm_profile/run-0 comm_profile/run-1
    """
    a, b = run_of(a), run_of(b)
    runs = (read_run(a), read_run(b))
    summaries = {"A": summarize(runs[0]), "B": summarize(runs[1])}
    found = compare(*map(measured, runs, summaries.values()))
    if as_json:
        content = {"schema": SCHEMA, "verdict": verdict(found)}
        for folder, (name, each) in zip((a, b), summaries.items(), strict=True):
            steps = {"steps": len(each.per_step.steps), "all_steps": each.steps}
            content[name.lower()] = {"folder": folder, "run": each.run, **steps}
        content["differences"] = list(map(vars, found))
        typer.echo(to_json(content))
    else:
        for folder, (name, each) in zip((a, b), summaries.items(), strict=True):
            typer.echo(f"{name}: {folder} ({describe(each)})")
        print_lines(verdict(found))
        print_differences(found)
        legend = (
            "medians over the steps in detail (a report has means), parts as means over ranks; "
            "'all steps' is over all"
        )
        notes = [f"note: {name}: {note}" for name, each in summaries.items() for note in each.notes]
        print_lines(legend, *notes)
    _require_steps(dict(zip((a, b), summaries.values(), strict=True)))


app.command("whatif")(whatif_command)


def _require_steps(summaries: Mapping[str, Summary]) -> None:
    """Of each folder; what there is has been shown."""
    empty = {folder: each for folder, each in summaries.items() if not each.steps}
    for folder, each in empty.items():
        reason = each.unavailable["steps"]
        typer.echo(f"lightning-dist: no report for {folder}: {reason}", err=True)
    if empty:
        raise typer.Exit(BAD_INPUT)


def describe(summary: Summary) -> str:
    """Short description of a run."""
    run = summary.run
    steps = count(summary.steps, "step")
    if (in_detail := len(summary.per_step.steps)) < summary.steps:
        steps = f"{in_detail} of {steps} in detail"
    ranks, nodes = run.get("world_size", 0), len(set(run.get("nodes", ())))
    codec = str(run.get("codec") or "codec not known")
    return ", ".join((codec, count(ranks, "rank"), count(nodes, "node"), steps))


def print_differences(differences: Sequence[Difference]) -> None:
    """Print one row for everything that was compared."""
    figures = ("A", "B", "B - A", "spread")
    print_table(
        ("", *figures, " "),
        map(_cells, differences),
        right=figures,
        fold=(" ",),
        optional=("spread",),
    )


def _cells(each: Difference) -> tuple[str, ...]:
    name, _, unit = each.name.rpartition("_")
    label = f"  {METRICS[name].label}" if name in PARTS else name.replace("_", " ")

    def figure(value: float | None, *, signed: bool = False) -> str:
        return format_value(value, "MB" if unit == "mb" else unit, signed=signed)

    spread = MISSING if each.spread is None else f"± {figure(each.spread)}"
    if each.difference is None:
        remark = each.reason
    elif each.is_explained:
        remark = "within the spread" if each.difference else ""
    else:
        remark = format_value(each.difference / each.a, "%", signed=True) if each.a else ""
    change = figure(each.difference, signed=True)
    return label, figure(each.a), figure(each.b), change, spread, remark
