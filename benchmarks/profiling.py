"""Is what CommProfiler says true, and what does it cost?

Two ranks on two hosts of benchmarks/testbed.py. Planted are skew, time of a codec and rates of
links, and the clocks of the hosts are compared, which are one; then the same step with and without
the profiler, block by block, and how long its files take to be made.

    python -m benchmarks.profiling --json FILE [--only KIND] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.profiling_cases import CODECS, LINKS_MBIT, TRUTHS, cost_cases, run_cases
from benchmarks.profiling_outputs import outputs
from benchmarks.profiling_tables import show
from benchmarks.ranks import RankFailed
from benchmarks.report import collect_meta, write_json
from benchmarks.testbed import Testbed, TestbedUnavailable

Row = dict[str, Any]
KINDS = ("skew", "codec", "wire", "clocks", "outputs", "cost")
_SIZES = ((2, 100), (2, 5000), (8, 100), (8, 5000))
"""Ranks and steps of profiles whose files are made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", choices=KINDS, help="repeatable")
    parser.add_argument("--rounds", type=int, default=6, help="blocks with and without, of cost")
    given = parser.parse_args()
    kinds = given.only or [*KINDS]
    meta = collect_meta(seed=0, arguments={"kinds": kinds, "rounds": given.rounds})
    rows: list[Row] = []
    try:
        for found in _measured(kinds, given.rounds):
            show(found)
            rows += found
            if given.json:  # after each, so that a failure of a later one loses nothing
                write_json(given.json, meta=meta, rows=rows)
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"benchmarks/profiling.py: {error}")


def _measured(kinds: list[str], rounds: int) -> Iterator[list[Row]]:
    """The rows of one kind after the other."""
    links: dict[str, tuple[float | None, ...]] = {"wire": LINKS_MBIT, "clocks": (200.0,)}
    for kind in kinds:
        if kind == "outputs":
            with tempfile.TemporaryDirectory() as folder:
                yield [
                    outputs(Path(folder) / f"{r}-{s}", ranks=r, steps=s, seed=0) for r, s in _SIZES
                ]
        elif kind == "cost":
            for codec in CODECS:
                with Testbed(hosts=2, link_mbit=None) as testbed:
                    yield run_cases(testbed, cost_cases(codec, rounds=rounds))
        else:
            of_kind: list[Row] = []
            for link in links.get(kind, (None,)):
                with Testbed(hosts=2, link_mbit=link) as testbed:
                    of_kind += run_cases(testbed, TRUTHS[kind]())
            yield of_kind


if __name__ == "__main__":
    main()
