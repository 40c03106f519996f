"""Figures of README.md and docs/, as SVG, from the JSON of the benchmarks: see ``docs_tables``.

Background transparent, text grey: readable on light pages and on dark ones. Text stays text, and
nothing depends on the time or on chance, so that the same results are the same file.

    python -m benchmarks.figures --json benchmarks/results/panels.json

measures what one of them shows: the history of a short run of examples/lightning_cli. A CSVLogger
beside the example's WandbLogger gets the same metrics at the same steps.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.results import parser_of, positive, recording
from benchmarks.harness.tables import Result, name_of, of_link

EXAMPLE = REPOSITORY / "examples" / "lightning_cli"
GREY = "#848d97"
COLOURS = {
    "ddp": "#d1493f",
    "torch-fp16-hook": "#d18f2c",
    "int8": "#3f8fd1",
    "int4": "#2f9e6b",
    "terngrad": "#8f6fd1",
}
"""Of the rows that are drawn."""
_LABELS = {
    **dict.fromkeys(("bf16", "int8", "int4", "sign", "randomk", "dgc", "threshold"), (4, 4)),
    **{"terngrad": (5, 0), "topk": (5, -8), "powersgd": (5, -8)},
    "powersgd:two_phase=true": (-66, 6),
}
"""Codecs of the second figure, and where their names stand beside their points."""

PANELS = {
    "Loss": ("train_loss", "val_loss"),
    "Perplexity": ("val_perplexity",),
    "Accuracy": ("val_accuracy",),
    "Compression ratio": ("comm/compression_ratio",),
    "Exposed communication": ("comm/exposed_fraction",),
    "Step time, ms": ("comm/step_ms", "comm/exposed_ms", "comm/codec_total_ms"),
    "Bytes per step": ("comm/raw_bytes", "comm/wire_bytes"),
    "Compression error": ("comm/error_relative_l2",),
}
"""Metrics of the third figure, by panel."""


def overview(results: Mapping[str, Result]) -> str:
    """Step time over the rate of the link, and seconds to the loss that fp32 DDP reaches."""
    with _figure(9.0, 3.4, 2) as (figure, (steps, seconds)):
        _steps(steps, results["allreduce"])
        _seconds(seconds, results["time_to_accuracy"])
        figure.tight_layout(w_pad=3.0)
        return _svg(figure)


def loss_over_bytes(results: Mapping[str, Result]) -> str:
    """Final loss against fp32 DDP's, over how many times fewer bytes a codec sends."""
    with _figure(9.0, 4.2, 2) as (figure, panels):
        for axes, (task, metric) in zip(
            panels, (("gpt", "val_loss"), ("digits", "test_loss")), strict=True
        ):
            rows = [
                row
                for row in results["convergence"]["rows"]
                if (row["task"], row["ranks"]) == (task, 2)
                and row["metrics"]
                and row["row"] in _LABELS
            ]
            optimizer = {"gpt": "GPT, AdamW", "digits": "digits, SGD"}[task]
            for row in rows:
                found = row["metrics"][metric]
                at = row["bytes_ratio"], found["diff_pct_of_ddp"]
                axes.errorbar(
                    *at, yerr=found["diff_pct_std"], fmt="o", color=COLOURS["int8"], ms=4, lw=1
                )
                axes.annotate(
                    row["codec"].replace(":two_phase=true", ", 2 phases"),
                    at,
                    xytext=_LABELS[row["codec"]],
                    textcoords="offset points",
                    fontsize=8,
                )
            axes.axhline(0.0, lw=0.8)
            axes.set_xscale("log", base=2)
            axes.set_yscale("symlog", linthresh=5)
            _plain_ticks(axes, "x", [1, 4, 16, 64])
            _plain_ticks(axes, "y", [-5, 0, 5, 25, 100, 400])
            axes.set_xlabel("times fewer bytes")
            axes.set_title(f"{optimizer}: loss against fp32 DDP, %", fontsize=10)
        figure.tight_layout(w_pad=3.0)
        return _svg(figure)


def panels(results: Mapping[str, Result]) -> str:
    """Metrics over steps, as wandb shows them: history of one run of an example."""
    rows = results["panels"]["rows"]
    with _figure(9.0, 4.6, 4, rows=2) as (figure, places):
        for axes, (title, metrics) in zip(places, PANELS.items(), strict=True):
            for name, colour in zip(metrics, COLOURS.values(), strict=False):
                points = [(row["step"], row[name]) for row in rows if name in row]
                axes.plot(*zip(*points, strict=True), "o-", ms=2, lw=1, color=colour, label=name)
            axes.set_title(title, fontsize=10)
            highest = axes.dataLim.ymax
            axes.set_ylim(0, highest * (1.1 + 0.1 * len(metrics)))  # room for the names
            axes.legend(frameon=False, fontsize=7, loc="upper left", borderpad=0)
            if "bytes" in metrics[0]:
                axes.yaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
        figure.tight_layout()
        return _svg(figure)


FIGURES: dict[str, Callable[[Mapping[str, Result]], str]] = {
    "docs/figures/overview.svg": overview,
    "docs/figures/loss-over-bytes.svg": loss_over_bytes,
    "docs/figures/panels.svg": panels,
}
"""Each file, and what draws it of the results."""


def _steps(axes: Axes, result: Result) -> None:
    rows = [row for row in result["rows"] if row["hosts"] == 2 and row["reason"] is None]
    links = sorted({row["link_mbit"] for row in rows})
    for codec in ("ddp", "torch-fp16-hook", "int8", "int4"):
        by_link = {r["link_mbit"]: r["step_ms_median"] for r in rows if r["codec"] == codec}
        times = [by_link[link] / 1000 for link in links]
        axes.plot(links, times, "o-", ms=4, color=COLOURS[codec], label=_plain(codec))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes, "x", links, [of_link(link) for link in links])
    _plain_ticks(axes, "y", [0.1, 0.3, 1, 3, 10])
    axes.set_title("seconds per step, 10.5 M parameters, 2 nodes", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _seconds(axes: Axes, result: Result) -> None:
    chosen = [row for row in result["rows"] if row["row"] in COLOURS]
    for row in reversed(chosen):
        took = row["seconds_to_target"]
        axes.barh(_plain(row["row"]), took, color=COLOURS[row["row"]], height=0.6)
        axes.annotate(
            f"{took:.0f} s",
            (took, _plain(row["row"])),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    link = of_link(result["meta"]["arguments"]["link"])
    axes.set_title(f"seconds to fp32 DDP's loss, small GPT, {link}", fontsize=10)
    axes.margins(x=0.12)


def _plain(row: str) -> str:
    return name_of(row).replace("`", "")


def _plain_ticks(axes: Axes, which: str, at: list[Any], labels: list[str] | None = None) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(matplotlib.ticker.FixedLocator(at))
    axis.set_major_formatter(
        matplotlib.ticker.FixedFormatter(labels or [f"{each:g}" for each in at])
    )
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


@contextmanager
def _figure(
    width: float, height: float, columns: int, *, rows: int = 1
) -> Iterator[tuple[Figure, list[Axes]]]:
    style = {
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY
        ),
        "lines.color": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "lightning_dist",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height))
        yield figure, list(figure.subplots(rows, columns).flat)


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def history(steps: int) -> list[dict[str, float]]:
    """One row for each step that something was logged at."""
    options = {
        "limit_train_batches": steps,
        "val_check_interval": max(1, steps // 6),
        "log_every_n_steps": 4,
        "enable_progress_bar": "false",
        "logger+": "lightning.pytorch.loggers.CSVLogger",
        "logger.init_args.save_dir": "csv",
    }
    command = [sys.executable, EXAMPLE / "train.py", "fit", "--config", EXAMPLE / "config.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, *(f"--trainer.{name}={value}" for name, value in options.items())],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "offline"},
            stdout=sys.stderr,
            check=True,
        )
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for log in Path(folder).glob("csv/**/metrics.csv"):
            with log.open(newline="") as file:
                for row in csv.DictReader(file):
                    found = {name: float(f"{float(v):.5g}") for name, v in row.items() if v}
                    rows[int(row["step"])] |= found
    return [{**rows[step], "step": step} for step in sorted(rows)]


def main() -> None:
    """Train, and keep what was logged."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=positive, default=120)
    given = parser.parse_args()
    with recording(given, seed=7) as record:
        record.rows += history(given.steps)


if __name__ == "__main__":
    main()
