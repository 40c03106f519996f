"""What does a communication hook in Python cost in the place of DDP's own allreduce?

Two ranks on two hosts of benchmarks/testbed.py with plain DDP: small buckets where nothing limits
them, and large ones, as DDP makes them, at 1 Gbit/s. With torch's own hook, and with the one of
the profiler, whose recorder is off, as in most steps, or on.

    python -m benchmarks.profiling_hooks --json FILE [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.profiling_cases import Case, run_cases
from benchmarks.profiling_rows import hook_rows
from benchmarks.profiling_tables import show
from benchmarks.ranks import RankFailed
from benchmarks.report import collect_meta, write_json
from benchmarks.testbed import Testbed, TestbedUnavailable

_SMALL = {"layers": 40, "width": 128, "step_ms": 30.0, "block_s": 0.2}
"""Short blocks, many of them: what a machine does besides changes within seconds."""
_LARGE = {"layers": 4, "width": 2560, "step_ms": 1000.0, "block_s": 2.0}
_ROUNDS_OF_SMALL = 5
"""For each of the large ones, which take longer."""
_SETTINGS: tuple[tuple[float | None, tuple[int, ...], dict[str, Any]], ...] = (
    (None, (1, 8, 40), _SMALL),
    (1000.0, (4,), _LARGE),
)
"""Mbit/s, numbers of buckets, and the model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=12, help="blocks with large buckets")
    given = parser.parse_args()
    meta = collect_meta(seed=0, arguments={"rounds": given.rounds})
    rows: list[dict[str, Any]] = []
    try:
        for link_mbit, buckets, arguments in _SETTINGS:
            rounds = given.rounds * (_ROUNDS_OF_SMALL if link_mbit is None else 1)
            cases = [
                Case(
                    "hooks",
                    {**arguments, "rounds": rounds, "buckets": count},
                    lambda folder, truth, link: hook_rows(truth, link_mbit=link),
                )
                for count in buckets
            ]
            with Testbed(hosts=2, link_mbit=link_mbit) as testbed:
                found = run_cases(testbed, cases)
            show(found)
            rows += found
            if given.json:
                write_json(given.json, meta=meta, rows=rows)
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"benchmarks/profiling_hooks.py: {error}")


if __name__ == "__main__":
    main()
