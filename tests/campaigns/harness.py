"""Harness of the campaigns: trials in forks, verdicts on them, and their sums by kind."""

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Record, parser_of
from benchmarks.harness.tables import markdown
from tests.runner.processes import HELPERS, ROOT


def run_campaign(package: str) -> int:
    """Run ``main`` of ``package.campaign`` in a process that finds the helpers of the tests."""
    if importlib.util.find_spec("elastic_jobs") is None:
        paths = os.pathsep.join(map(str, (ROOT, *HELPERS)))
        command = [sys.executable, "-m", package, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": paths})
    code: int = importlib.import_module(f"{package}.campaign").main()
    return code


class Hang(RuntimeError):
    """Something took longer than it may."""


@dataclass
class Verdict:
    """One trial, and what should not have happened in it."""

    kind: str
    number: int
    problems: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def require(self, holds: bool, problem: str, what: str) -> None:
        found = problem, without_paths(what)
        if not holds and found not in self.problems:
            self.problems.append(found)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Time the block; an exception is a ``"report"``, with the end of its traceback."""
        began = time.monotonic()
        try:
            yield
        except Hang as hang:
            self.require(False, "hang", str(hang))
        except Exception:
            self.require(False, "report", traceback.format_exc()[-2000:])
        self.seconds = time.monotonic() - began


def without_paths(text: str) -> str:
    """``text`` without the folders of this machine."""
    for path in (str(ROOT), sys.prefix, tempfile.gettempdir(), str(Path.home())):
        text = text.replace(path, "...")
    return text


def relative_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """How far weights are from others, at most, relative to the largest of those."""
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) / largest


def parser_of_trials(doc: str | None, *, folder: str) -> argparse.ArgumentParser:
    """A command line with what all campaigns know. folder: what it is for."""
    parser = parser_of(doc)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, help="only the trial of this number")
    parser.add_argument("--folder", type=Path, help=folder)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def run_trials(
    title: str,
    run: Callable[[Any], Any],
    trials: Iterable[Any],
    *,
    given: argparse.Namespace,
    record: Record,
    problems: Sequence[str],
    figures: Callable[[list[Any]], dict[str, Any]],
    initializer: Callable[[], None] | None = None,
) -> int:
    """Run trials side by side, in forks of this process, which has imported all.

    The record gets a row for each kind; a trial counts once under each problem that it has.
    Returns 1 if any has one, else 0.

    Args:
        run: gives a verdict; or None: the trial was left out.
        figures: what else the row of a kind has, of its verdicts; numbers and texts are shown.
    """
    began = time.monotonic()
    wanted = [trial for trial in trials if given.number in (None, trial.number)]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(given.workers, context, initializer) as pool:
        verdicts = [verdict for verdict in pool.map(run, wanted) if verdict is not None]
    seconds, count = round(time.monotonic() - began, 1), len(verdicts)
    record.meta |= {"seconds": seconds, "trials": count}
    record.meta["trials_per_minute"] = round(count * 60 / max(seconds, 0.1), 1)
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        found = [verdict for verdict in verdicts if verdict.kind == kind]
        counts = Counter(name for each in found for name in {name for name, _ in each.problems})
        row = {"kind": kind, "trials": len(found), **{name: counts[name] for name in problems}}
        record.rows.append(row | figures(found))
    if record.rows:
        columns = [k for k, v in record.rows[0].items() if not isinstance(v, list)]
        show(f"{title}: {count} trials in {seconds} s", columns, record.rows)
    for verdict in verdicts:
        if verdict.problems:
            print(f"{verdict.kind}: trial {verdict.number}: {verdict.problems[:3]}")
    return int(any(verdict.problems for verdict in verdicts))


def show(title: str, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """A table of these columns on stdout."""

    def cell(row: Mapping[str, Any], *, key: str) -> str:
        return f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key])

    print(f"\n{title}\n\n{markdown([(key, partial(cell, key=key)) for key in columns], rows)}")
