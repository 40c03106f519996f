"""A wandb workspace with panels for communication, checkpoints and restarts.

    pip install wandb-workspaces
    python examples/wandb_dashboard.py ENTITY PROJECT [--print]

``docs/wandb.md`` says what to look for in each panel. ``--print`` needs no network and no account.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as workspaces

Panels = Mapping[str, tuple[str, ...]]
SECTIONS: Mapping[str, Panels] = {
    "Communication": {
        "Exposed communication": ("comm/exposed_fraction",),
        "Step time, ms": (
            "comm/step_ms",
            "comm/exposed_ms",
            "comm/hidden_ms",
            "comm/codec_total_ms",
        ),
        "Compression ratio": ("comm/compression_ratio",),
        "Bytes per step": ("comm/raw_bytes", "comm/wire_bytes"),
        "Bytes by link": ("comm/intra_bytes", "comm/inter_bytes"),
        "Compression error": ("comm/error_relative_l2", "comm/error_cosine"),
        "Residual norm over gradient norm": ("comm/residual_ratio",),
        "Bandwidth, Gbit/s": ("comm/wire_gbps", "comm/ddp_equivalent_busbw_gbps"),
    },
    "Checkpoints": {
        "Checkpoints: blocking, ms": ("checkpoint/blocking_ms", "checkpoint/queue_ms"),
        "Checkpoints: wait in optimizer steps, ms": ("checkpoint/optimizer_wait_ms",),
        "Checkpoints: writing, ms": ("checkpoint/write_ms",),
        "Checkpoints: size and failures": (
            "checkpoint/bytes",
            "checkpoint/in_flight",
            "checkpoint/skipped",
            "checkpoint/failed",
        ),
    },
    "Restarts": {
        "World size": ("elastic/world_size",),
        "Restarts": (
            "elastic/restarts",
            "elastic/lost_time_s",
            "elastic/samples_recomputed",
        ),
        "Recovery within the process": (
            "elastic/generations",
            "elastic/steps_redone",
            "elastic/recovery_s",
            "elastic/residual_norm_lost",
        ),
    },
}
"""Metrics by panel, by section."""

MEASURED_AT_THE_END = "Bandwidth, Gbit/s"
"""One value for each run."""


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """The workspace, not saved yet."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="lightning_dist",
        sections=[
            workspaces.Section(name=name, panels=list(map(_panel, found, found.values())))
            for name, found in SECTIONS.items()
        ],
    )


def _panel(title: str, metrics: tuple[str, ...]) -> Any:
    if title == MEASURED_AT_THE_END:
        return panels.BarPlot(title=title, metrics=list(metrics))
    return panels.LinePlot(title=title, y=list(metrics))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("entity", help="user or team")
    parser.add_argument("project")
    parser.add_argument("--print", action="store_true", help="show the definition, save nothing")
    arguments = parser.parse_args()
    made = workspace(arguments.entity, arguments.project)
    if arguments.print:
        print(json.dumps(made._to_model().model_dump(mode="json", by_alias=True), indent=2))
    else:
        made.save()
        print(made.url)


if __name__ == "__main__":
    main()
