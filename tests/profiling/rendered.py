"""Texts that renderers made once, kept in ``kept/snapshots``.

``UPDATE_SNAPSHOTS=1`` writes them anew: look at the difference before it is committed.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.report.terminal import print_summary

KEPT = Path(__file__).with_name("kept") / "snapshots"


def assert_snapshot(name: str, text: str) -> None:
    path = KEPT / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def printed(summary: Summary, *, width: int = 200, color: bool = False) -> str:
    file = io.StringIO()
    print_summary(summary, Console(file=file, width=width, force_terminal=color))
    return file.getvalue()
