"""Runs under CommProfiler for several files of tests, and what those of one kind must leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import port, run

from lightning_dist.profiling.run import Run, read_run

SCRIPT = Path(__file__).with_name("scenarios") / "profiled.py"
MS = 1e6


def profiles(folder: Path, cases: Sequence[str], *, python: Sequence[str]) -> dict[str, Path]:
    """The folder of each case of the script, after two ranks have run it."""
    command = [*python, SCRIPT, folder, *cases]
    done = run(command, limit=110, MASTER_PORT=str(port())).require_success()
    assert done.output.count("[0, 0]") == len(cases), done.output
    return {name: folder / name.replace(" ", "-") for name in cases}


def truth(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"truth-{rank}.json").read_text()) for rank in range(2)]


def profile(folder: Path, run: int = 0) -> tuple[Run, dict[str, Any]]:
    found = folder / f"run-{run}"
    return read_run(found), json.loads((found / "summary.json").read_text())


def require_report_of_failure(folder: Path, reason: str) -> None:
    """A training that failed after some steps has a report, which says of what."""
    profiled, summary = profile(folder)
    assert profiled.ranks[0].end is not None
    assert profiled.ranks[0].end.reason.startswith(reason)
    assert 5 <= len(profiled.ranks[0].steps) <= 9
    assert summary["steps"] > 0
    assert (folder / "run-0" / "report.html").stat().st_size > 1e6


def require_no_prediction(folder: Path, reason: str) -> None:
    """Codecs were not measured at the end, and it is said why."""
    _, summary = profile(folder)
    assert summary["predictions"] is None
    found = summary["unavailable"]["predictions"]
    assert found == f"{reason}; `lightning-dist profile whatif DIR` measures"
    assert not (folder / "run-0" / "costs.json").exists()
