"""Results of a benchmark: rows, shown and kept as they come, with what it ran on."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.launch import REPOSITORY, RankFailed
from benchmarks.harness.tables import Result, Rows
from benchmarks.harness.testbed import TestbedUnavailable
from lightning_dist import __version__

_GIT_TIMEOUT_S = 10.0


def collect(
    program: str,
    arguments: argparse.Namespace,
    groups: Iterable[Rows],
    *,
    tables: Sequence[Callable[[Result], str | None]],
    seed: int = 0,
    renew: bool = False,
) -> Rows:
    """The rows of all groups, each of which is shown and written to ``--json`` when it is measured.

    Where there is no test-bed, or a rank fails, the process ends with a message.

    Args:
        tables: make a section of a group; None where it has no rows for it.
        renew: keep the rows of other kinds that the file has.
    """
    path = arguments.json
    listed = {name: value for name, value in vars(arguments).items() if name != "json"}
    meta = collect_meta(seed=seed, arguments=listed)
    kept = json.loads(path.read_text()) if renew else None
    rows: list[Any] = []
    try:
        for group in groups:
            rows += group
            shown = (table({"meta": meta, "rows": group}) for table in tables)
            print(*(f"\n{text}" for text in shown if text), sep="\n", flush=True)
            if path:  # after each, so that a failure of a later one loses nothing
                result = {"meta": meta, "rows": rows}
                write_json(path, **(renewed(kept, result) if kept else result))
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"{program}: {error}")
    return rows


def collect_meta(*, seed: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What somebody needs to repeat a run or to doubt it; names no path of this machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "lightning_dist": __version__,
        },
        "git_commit": _git_commit(),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "seed": seed,
        "arguments": dict(arguments),
    }


def write_json(path: Path, *, meta: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write {"meta": ..., "rows": [...]}, a row in a line; never half a file."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"meta": {json.dumps(meta)},\n"rows": [\n{lines}\n]}}'
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def renewed(kept: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """``kept`` with the rows of ``result`` in the place of those that are of the same kinds.

    The ``meta`` of these is under ``renewed`` in ``meta``, by kind.
    """
    fresh = _by_kind(result["rows"])
    metas = {**kept["meta"].get("renewed", {}), **dict.fromkeys(fresh, result["meta"])}
    kinds = {**_by_kind(kept["rows"]), **fresh}
    return {
        "meta": {**kept["meta"], "renewed": metas},
        "rows": [row for rows in kinds.values() for row in rows],
    }


def error_sizes(errors: Sequence[float]) -> dict[str, float]:
    """Median and largest of relative errors without their signs, and how many there are."""
    sizes = [abs(error) for error in errors]
    return {"rows": len(sizes), "median": median(sizes), "largest": max(sizes)}


def _by_kind(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    return kinds


def _git_commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ from it."""
    # Read only: without --no-optional-locks git would rewrite the index.
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    command = ["git", "--no-optional-locks", "-C", str(REPOSITORY), *describe]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def say(text: str) -> None:
    """Print progress, beside the tables on stdout."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An option that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def rate(text: str) -> float | None:
    """An option that is the rate of a link in Mbit/s, or ``none``."""
    return None if text == "none" else float(text)
