"""Tests that take long and run little that others do not: candidates for the exhaustive tier.

A test stays in the tier of CI if it takes less than ``--quick`` seconds, or if it runs a block that
fewer than ``--times`` others of that tier run; the quickest are asked first.

    python -m tests.campaigns.mutants.tiers --hits FOLDER --quick 2 --times 3
"""

import argparse
from collections import Counter
from pathlib import Path

from tests.campaigns.mutants.hits import seconds_of_tests, tests_of_blocks


def left_out(hits: Path, *, quick: float, times: int) -> tuple[list[str], dict[str, float]]:
    """Those tests, and what each of all tests takes."""
    _, of_blocks = tests_of_blocks(hits)
    seconds = seconds_of_tests(hits)
    blocks: dict[str, list[int]] = {test: [] for test in seconds}
    for block, tests in enumerate(of_blocks):
        for test in tests:
            blocks.setdefault(test, []).append(block)
    ran: Counter[int] = Counter()
    out = []
    for test in sorted(seconds, key=lambda test: seconds[test]):
        adds = any(ran[block] < times for block in blocks[test])
        if seconds[test] < quick or adds:
            ran.update(blocks[test])
        else:
            out.append(test)
    return out, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hits", type=Path, required=True)
    parser.add_argument("--quick", type=float, default=2.0)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    out, seconds = left_out(given.hits, quick=given.quick, times=given.times)
    for test in sorted(out, key=lambda test: -seconds[test]):
        print(f"{seconds[test]:8.1f} {test}")
    print(f"{sum(seconds[test] for test in out):8.1f} of {sum(seconds.values()):.1f} seconds")


if __name__ == "__main__":
    main()
