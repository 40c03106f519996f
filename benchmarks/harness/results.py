"""Results of a benchmark: rows with what they were measured on, shown as tables, kept as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.harness.launch import REPOSITORY, Layout, RankFailed
from benchmarks.harness.tables import Result, Rows
from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from lightning_dist import __version__

_REASON = 300  # characters


def parser_of(doc: str | None, *, renews: bool = False) -> argparse.ArgumentParser:
    """A command line with --json, described by the first line of the module's docstring.

    Args:
        renews: rows are of several kinds, and some can be measured again: --renew.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here")
    if renews:
        parser.add_argument("--renew", action="store_true", help="keep its rows of other kinds")
    return parser


def require_testbeds(
    parser: argparse.ArgumentParser, links: Iterable[float | None], layouts: Iterable[str]
) -> None:
    """End with a message where the test-bed has no such rate, or a layout is none."""
    try:
        for layout, link in itertools.product(layouts, links):
            Testbed(Layout.parse(layout).hosts, link_mbit=link)
    except ValueError as error:
        parser.error(str(error))


class Record:
    """``{"meta": ..., "rows": [...]}`` of one run.

    Args:
        given: the command line; where it has no ``json`` nothing is written.
    """

    def __init__(self, given: argparse.Namespace, *, seed: int = 0) -> None:
        options = {k: v for k, v in vars(given).items() if k != "json" and not isinstance(v, Path)}
        self.meta = collect_meta(seed=seed, arguments=options)
        self.rows: list[Any] = []
        self._path: Path | None = given.json
        renews = getattr(given, "renew", False)
        self._kept = json.loads(given.json.read_text()) if renews else None

    def add(self, rows: Rows, *tables: Callable[[Result], str | None]) -> None:
        """Show more rows, and write all: a failure of a later one loses nothing."""
        self.rows += rows
        self.show(*tables, rows=rows)
        self.write()

    def show(self, *tables: Callable[[Result], str | None], rows: Rows | None = None) -> None:
        """Print the tables of all rows, or of some, that have rows for them."""
        result = {"meta": self.meta, "rows": self.rows if rows is None else rows}
        for text in filter(None, (table(result) for table in tables)):
            print(f"\n{text}", flush=True)

    def write(self) -> None:
        """Write the JSON, a row in a line; never half a file."""
        if self._path is None:
            return
        result: dict[str, Any] = {"meta": self.meta, "rows": self.rows}
        if self._kept:
            result = renewed(self._kept, result)
        lines = ",\n".join(json.dumps(row) for row in result["rows"])
        text = f'{{"meta": {json.dumps(result["meta"])},\n"rows": [\n{lines}\n]}}\n'
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(self._path)


@contextmanager
def recording(given: argparse.Namespace, *, seed: int = 0) -> Iterator[Record]:
    """A record that is written when the block is left.

    The process ends with a message where there is no test-bed, a rank fails, or replicas differ;
    and at once where there is nothing to renew.
    """
    if getattr(given, "renew", False) and not (given.json and given.json.exists()):
        sys.exit("--renew needs the results to renew: --json with a file that exists")
    record = Record(given, seed=seed)
    try:
        yield record
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(str(error))
    record.write()
    rows = [row for row in record.rows if row.get("replicas_identical") is False]
    if differing := [row.get("row") or row["codec"] for row in rows]:
        sys.exit(f"replicas differ with {', '.join(differing)}")


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


def renewed(kept: Result, result: Result) -> dict[str, Any]:
    """``kept`` with the rows of ``result`` in the place of those that are of the same kinds.

    The ``meta`` of these is under ``renewed`` in ``meta``, by kind.
    """
    kinds: dict[str, list[Any]] = {}
    for row in kept["rows"]:
        kinds.setdefault(row["kind"], []).append(row)
    fresh = dict.fromkeys(row["kind"] for row in result["rows"])
    kinds |= {kind: [row for row in result["rows"] if row["kind"] == kind] for kind in fresh}
    metas = {**kept["meta"].get("renewed", {}), **dict.fromkeys(fresh, result["meta"])}
    rows = [row for of_kind in kinds.values() for row in of_kind]
    return {"meta": {**kept["meta"], "renewed": metas}, "rows": rows}


def _git_commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ from it."""
    # Read only: without --no-optional-locks git would rewrite the index.
    command = ["git", "--no-optional-locks", "-C", str(REPOSITORY), "describe"]
    command += ["--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def say(text: str) -> None:
    """Print progress, beside the tables on stdout."""
    print(text, file=sys.stderr, flush=True)


def of_tests(report: Path) -> dict[str, Any]:
    """Counts of pytest's JUnit ``report``, and the first words of each failure, by test."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    failed = {
        f"{case.get('classname')}::{case.get('name')}": str(problem.get("message"))[:_REASON]
        for case in suite.iter("testcase")
        for problem in (*case.iter("failure"), *case.iter("error"))
    }
    return {**{name: int(suite.get(name, 0)) for name in ("tests", "skipped")}, "failed": failed}


def is_missing(device: str) -> bool:
    """Whether ``"cuda"`` is asked for where there is none; says so."""
    missing = device == "cuda" and not torch.cuda.is_available()
    if missing:
        print("There is no CUDA here (torch.cuda.is_available() is False): nothing was measured.")
    return missing


def positive(text: str) -> int:
    """An option that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def rate(text: str) -> float | None:
    """An option that is the rate of a link in Mbit/s, or ``none``."""
    return None if text == "none" else float(text)
