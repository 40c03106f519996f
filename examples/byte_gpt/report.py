"""The demo's table and picture, made from the results of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Result = Mapping[str, Any]

# The second curve often lies on the first, which must stay visible under it.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#d9822b", "marker": "o", "markersize": 9.0, "linewidth": 3.0},
    {"color": "#1f4e8c", "marker": "s", "markersize": 4.0, "linestyle": "--"},
)


def megabytes(count: float | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:,.1f} MB"


def results_table(results: Sequence[Result]) -> Table:
    """Table with one row per run, compared with the first."""
    first = results[0]
    table = Table(
        title=f"Byte-level GPT, {first['parameters'] / 1e6:.1f} M parameters, "
        f"{first['ranks']} CPU processes, {first['steps']} steps\n"
        "bytes: TX counter of the loopback interface around fit, both directions,\n"
        "including other loopback traffic",
        caption="Loopback is not a slow network: compression can only cost time here.\n"
        "benchmarks/step_time measures what it saves on a slow link.",
    )
    table.add_column("strategy", no_wrap=True)
    for heading in ("first loss", "val loss", "on the wire", "ratio", "training"):
        table.add_column(heading, justify="right")
    for result in results:
        sent, reference = result["loopback_tx_bytes"], first["loopback_tx_bytes"]
        table.add_row(
            result["strategy"],
            f"{result['train_curve'][0][1]:.3f}",
            f"{result['val_loss']:.3f}",
            megabytes(sent),
            f"{reference / sent:.2f}x" if sent and reference else "-",
            f"{result['train_seconds']:.1f} s",
        )
    return table


def counted_line(result: Result) -> str | None:
    """Bytes counted by the strategy, beside those of the interface's counter."""
    counted = result["counted_by_strategy"]
    if counted is None:
        return None
    wire, raw = megabytes(counted["wire_bytes"]), megabytes(counted["raw_bytes"])
    return (
        f"counted by the strategy: rank 0 of {result['strategy']} sent {wire} where plain DDP "
        f"sends {raw}, ratio {counted['ratio']:.2f}x"
    )


def save_picture(results: Sequence[Result], *, path: Path) -> None:
    """Both runs' losses by step: every training step faint, validation on top of it."""
    from matplotlib.figure import Figure  # here, so that the demo can name it if it is missing

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for result, style in zip(results, STYLES, strict=False):
        axes.plot(*zip(*result["train_curve"], strict=True), color=style["color"], alpha=0.3)
        axes.plot(
            *zip(*result["val_curve"], strict=True),
            **style,
            label=f"{result['strategy']}: {result['val_loss']:.3f} at the end, "
            f"{megabytes(result['loopback_tx_bytes'])}",
        )
    axes.set(
        xlabel="step",
        ylabel="loss (nats per byte)",
        title="Loss on held-out files (faint: training loss of rank 0)",
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
