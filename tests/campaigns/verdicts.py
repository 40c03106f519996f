"""What the campaigns share: verdicts on trials, which run in forks, summed up by kind."""

from __future__ import annotations

import multiprocessing
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

from benchmarks.harness.tables import markdown

_REPOSITORY = Path(__file__).resolve().parents[2]


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
    for path in (str(_REPOSITORY), sys.prefix, tempfile.gettempdir(), str(Path.home())):
        text = text.replace(path, "...")
    return text


def in_forks(
    run: Callable[[Any], Any],
    trials: Iterable[Any],
    *,
    workers: int,
    initializer: Callable[[], None] | None = None,
) -> list[Any]:
    """Results of trials that run side by side, in forks of this process, which has imported all."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=initializer) as pool:
        return list(pool.map(run, trials))


def by_kind(
    verdicts: Sequence[Any], problems: Sequence[str]
) -> Iterator[tuple[str, list[Any], dict[str, int]]]:
    """Verdicts of each kind, and how many have each problem: a trial counts once under each."""
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        found = [verdict for verdict in verdicts if verdict.kind == kind]
        counts = Counter(name for each in found for name in {name for name, _ in each.problems})
        yield kind, found, {problem: counts[problem] for problem in problems}


def show(title: str, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """A table of these columns on stdout."""

    def cell(row: Mapping[str, Any], *, key: str) -> str:
        return f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key])

    print(f"\n{title}\n\n{markdown([(key, partial(cell, key=key)) for key in columns], rows)}")
