"""Is what CommProfiler says true, and what does it cost?

Two ranks on two hosts of benchmarks/testbed.py. Planted are skew, time of a codec and rates of
links, beside which stands what the interfaces have sent; the clocks of the hosts are compared,
which are one; then the same step with and without the profiler, block by block, and how long its
files take to be made.

    python -m benchmarks.profiling --json FILE [--only KIND] [--renew] [--rounds N] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import network
from benchmarks.profiling_cases import CODECS, TRUTHS, cost_cases, run_cases, wire_cases
from benchmarks.profiling_outputs import outputs
from benchmarks.profiling_rows import wire_rows
from benchmarks.profiling_tables import show
from benchmarks.ranks import RankFailed
from benchmarks.report import collect_meta, renewed, write_json
from benchmarks.testbed import Testbed, TestbedUnavailable

Row = dict[str, Any]
KINDS = ("skew", "codec", "wire", "clocks", "outputs", "cost")
_SIZES = ((2, 100), (2, 5000), (8, 100), (8, 5000))
"""Ranks and steps of profiles whose files are made."""
_LINKS = ((50.0, None), (50.0, "cubic"), (200.0, None), (1000.0, None))
"""Mbit/s and TCP's congestion control, None: the machine's own. At 50 Mbit/s steps are long, and
bbr does not fill the link all the time; cubic does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", choices=KINDS, help="repeatable")
    parser.add_argument("--renew", action="store_true", help="keep what FILE has of other kinds")
    parser.add_argument("--rounds", type=int, default=6, help="blocks with and without, of cost")
    parser.add_argument("--runs", type=int, default=3, help="of wire")
    given = parser.parse_args()
    if given.renew and not (given.json and given.json.exists()):
        parser.error("--renew needs the results to renew: --json with a file that exists")
    kinds = given.only or [*KINDS]
    arguments = {"kinds": kinds, "rounds": given.rounds, "runs": given.runs}
    meta = collect_meta(seed=0, arguments=arguments)
    kept = json.loads(given.json.read_text()) if given.renew else None
    rows: list[Row] = []
    try:
        for found in _measured(kinds, rounds=given.rounds, runs=given.runs):
            show(found)
            rows += found
            if given.json:  # after each, so that a failure of a later one loses nothing
                result = {"meta": meta, "rows": rows}
                write_json(given.json, **(renewed(kept, result) if kept else result))
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"benchmarks/profiling.py: {error}")


def _measured(kinds: list[str], *, rounds: int, runs: int) -> Iterator[list[Row]]:
    """The rows of one kind after the other."""
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
        elif kind == "wire":
            yield wire_rows([row for _ in range(runs) for row in _wire_runs()])
        else:
            with Testbed(hosts=2, link_mbit=200.0 if kind == "clocks" else None) as testbed:
                yield run_cases(testbed, TRUTHS[kind]())


def _wire_runs() -> Iterator[Row]:
    """Each link once: what disturbs the machine for a while disturbs all settings."""
    own = network.own_congestion_control()
    for link, control in dict.fromkeys((link, control or own) for link, control in _LINKS):
        with Testbed(hosts=2, link_mbit=link, congestion_control=control) as testbed:
            for row in run_cases(testbed, wire_cases()):
                yield {"congestion_control": control, **row}


if __name__ == "__main__":
    main()
