"""Commands of the benchmarks: options that several have, and rows that are kept as they come."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.harness.launch import RankFailed
from benchmarks.harness.results import collect_meta, renewed, write_json
from benchmarks.harness.tables import Result, Rows
from benchmarks.harness.testbed import TestbedUnavailable


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
