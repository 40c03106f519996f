"""``lightning-dist profile``: reports, comparisons and predictions of recorded profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lightning_dist.base.console import print_lines, print_table, stdout_console
from lightning_dist.cli.codecs import codec_names
from lightning_dist.cli.command import BAD_INPUT, Json, reported
from lightning_dist.measurement import CANDIDATES, CodecCost
from lightning_dist.profiling.analysis.compare import Difference, compare, measured, verdict
from lightning_dist.profiling.analysis.metrics import METRICS, MISSING, count, format_value
from lightning_dist.profiling.analysis.parts import PARTS, SCHEMA, Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.files import to_json, write_files
from lightning_dist.profiling.report.tables import predictions_table
from lightning_dist.profiling.report.terminal import draw_table, print_summary
from lightning_dist.profiling.run import read_run, run_folder
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.predict import (
    Costs,
    local_scenarios,
    predict,
    read_costs,
    runs_compiled,
    with_whatif,
)
from lightning_dist.profiling.whatif.scenarios import (
    DDP,
    LABEL,
    elsewhere,
    notes,
    scenarios_of,
    where,
)

app = typer.Typer(no_args_is_help=True, help="Report, compare and predict communication time.")

Folder = Annotated[str, typer.Argument(metavar="DIR", help="Folder that CommProfiler has written.")]


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
    differences = compare(*map(measured, runs, summaries.values()))
    if as_json:
        content = {"schema": SCHEMA, "verdict": verdict(differences)}
        for folder, (name, summary) in zip((a, b), summaries.items(), strict=True):
            steps = {"steps": len(summary.per_step.steps), "all_steps": summary.steps}
            content[name.lower()] = {"folder": folder, "run": summary.run, **steps}
        content["differences"] = list(map(vars, differences))
        typer.echo(to_json(content))
    else:
        for folder, (name, summary) in zip((a, b), summaries.items(), strict=True):
            typer.echo(f"{name}: {folder} ({describe(summary)})")
        print_lines(verdict(differences))
        print_differences(differences)
        legend = (
            "medians over the steps in detail (a report has means), parts as means over ranks; "
            "'all steps' is over all"
        )
        of_runs = summaries.items()
        notes = [f"note: {name}: {note}" for name, summary in of_runs for note in summary.notes]
        print_lines(legend, *notes)
    _require_steps(dict(zip((a, b), summaries.values(), strict=True)))


@app.command("whatif")
@reported
def whatif_command(
    folder: Folder,
    link_gbps: Annotated[float | None, typer.Option(help="Rate of a node's link, Gbit/s.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes, all of one size.")] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="A codec, or ddp; repeatable. Default: all.",
            autocompletion=lambda incomplete: [
                name for name in (DDP, *codec_names("")) if name.startswith(incomplete)
            ],
        ),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(help="Codec of the parameters, of FSDP2 over all ranks; repeatable."),
    ] = None,
    form: Annotated[
        list[str] | None, typer.Option(help="flat, hierarchical, leader; repeatable.")
    ] = None,
    inside_gbps: Annotated[
        float | None, typer.Option(help="Rate of a rank inside its node, Gbit/s.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Round trip between nodes, microseconds.")
    ] = None,
    local_steps: Annotated[
        list[int] | None, typer.Option(help="Local steps between two exchanges; repeatable.")
    ] = None,
    below: Annotated[
        float | None,
        typer.Option(help="Find the fewest local steps with waiting below this, percent."),
    ] = None,
    fragments: Annotated[
        int, typer.Option(min=1, help="Parts exchanged in turn, of local steps.")
    ] = 1,
    overlap_steps: Annotated[
        int, typer.Option(min=0, help="Steps that hide an exchange, of local steps.")
    ] = 0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure codecs on this machine now.")
    ] = False,
    compiled: Annotated[
        bool | None,
        typer.Option(help="Measure with compiled kernels or without. Default: as in the run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict step times with other codecs, links, nodes.

    Simulates the buckets of the profile with the rates that the run itself had and with codec costs
    as measured at the end of the run (costs.json), otherwise on this machine now. The run itself is
    predicted too: differences within the error of that are not ranked. `change` is against the
    run's own setting with the same link and nodes. Rates include packet headers, as nominal link
    rates do.

    \b
      lightning-dist profile whatif comm_profile/run-0
      lightning-dist profile whatif comm_profile/run-0 --codec powersgd:rank=8
      lightning-dist profile whatif comm_profile/run-0 --link-gbps 10 --nodes 8
    Local updates: for each codec the fewest steps with waiting below 5 %:
      lightning-dist profile whatif comm_profile/run-0 --link-gbps 0.05 --below 5
    """
    folder = run_of(folder)
    observed = observe(read_run(folder))
    network = {"link_gbps": link_gbps, "inside_gbps": inside_gbps, "latency_us": latency_us}
    there = elsewhere(observed.scenario, nodes=nodes, **network)
    if observed.shards is not None:
        _check_shards(codec or (), parameters or ())
    chosen = {"codecs": codec or (), "forms": form or (), "parameters": parameters or ()}
    scenarios = scenarios_of(observed.scenario, there, **chosen)
    names = [
        *(codec or [DDP, *CANDIDATES]),
        *{scenario.parameters for scenario in scenarios if scenario.parameters},
    ]
    costs = _costs(folder, names, observed, compiled=compiled, anew=measure or compiled is not None)
    local = local_scenarios(
        observed,
        there,
        costs=costs,
        codecs=codec or (),
        form=form[0] if form else None,
        sync_every=local_steps or (),
        below=None if below is None else below / 100,
        fragments=fragments,
        overlap_steps=overlap_steps,
    )
    predictions = predict(observed, [*scenarios, *local], costs=costs)
    if as_json:
        typer.echo(to_json(predictions.as_dict()))
        return
    console, baseline = stdout_console(), predictions.baseline
    predicted = where(predictions.scenarios[0], link_given=link_gbps is not None)
    measured = format_value(predictions.measured_ms, "ms")
    console.print(Text(f"Measured: {measured} a step ({baseline.codec}, {where(baseline)})."))
    console.print(Text(f"{LABEL}, {predicted}, ms (sent: MB):", style="bold"))
    table = predictions_table(predictions)
    console.print(draw_table(table, table.rows))
    print_lines(*(f"note: {note}" for note in notes(predictions)))


def run_of(folder: str) -> str:
    """The run of a folder that a user gives; of several the newest, named on stderr."""
    run, note = run_folder(folder)
    if note:
        typer.echo(f"lightning-dist: {note}", err=True)
    return str(run)


def _check_shards(gradients: Sequence[str], parameters: Sequence[str]) -> None:
    from lightning_dist.codecs import resolve_codec  # torch takes seconds

    for names, role in ((gradients, "gradients"), (parameters, "parameters")):
        for name in names:
            codec = None if name == DDP else resolve_codec(name)
            suited = codec and (codec.of_shards if role == "gradients" else codec.of_parameters)()
            if codec is not None and suited is None:
                raise ValueError(
                    f"codec {name} does not work for the {role} of a model that is sharded over "
                    "all ranks; use one such as 'int8'"
                )


def _costs(
    folder: str, names: Sequence[str], observed: Observed, *, compiled: bool | None, anew: bool
) -> Mapping[str, CodecCost]:
    """Costs that the run has kept; others are measured here, on a device of the same kind.

    Raises:
        ValueError: there is none here, and it was asked for.
    """
    import torch

    from lightning_dist.measurement.calibration import calibrate, to_measure

    device = observed.device
    is_here = device == "cpu" or torch.cuda.is_available()
    if anew and not is_here:
        raise ValueError(
            f"--measure and --compiled need a device like that of the run, {device}, and none is "
            "available here; leave them out, or run this on such a machine"
        )
    read = Costs() if anew else read_costs(folder)
    if not is_here:
        left = f"{read.reason}, so all but ddp is n/a"
        left = "codecs that the run has not measured are n/a" if read.by_name else left
        typer.echo(f"no {device} here to measure codecs on: {left}", err=True)
        return read.by_name
    if read.status == "unreadable":
        typer.echo(f"{read.reason}; measured here instead", err=True)
    fused = runs_compiled(observed) if compiled is None else compiled
    wanted = to_measure([name for name in names if name != DDP], observed.scenario.codec)
    kept = {  # without kernels that a compiler would make faster
        name: cost for name, cost in read.by_name.items() if cost.compiled or not fused
    }
    return {**kept, **calibrate([x for x in wanted if x not in kept], fused=fused, device=device)}


def _require_steps(summaries: Mapping[str, Summary]) -> None:
    """End with the reason where a folder has no steps; what there is has been shown."""
    empty = {folder: summary for folder, summary in summaries.items() if not summary.steps}
    for folder, summary in empty.items():
        reason = summary.unavailable["steps"]
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


def _cells(line: Difference) -> tuple[str, ...]:
    name, _, unit = line.name.rpartition("_")
    label = f"  {METRICS[name].label}" if name in PARTS else name.replace("_", " ")

    def figure(value: float | None, *, signed: bool = False) -> str:
        return format_value(value, "MB" if unit == "mb" else unit, signed=signed)

    spread = MISSING if line.spread is None else f"± {figure(line.spread)}"
    if line.difference is None:
        remark = line.reason
    elif line.is_explained:
        remark = "within the spread" if line.difference else ""
    else:
        remark = format_value(line.difference / line.a, "%", signed=True) if line.a else ""
    change = figure(line.difference, signed=True)
    return label, figure(line.a), figure(line.b), change, spread, remark
