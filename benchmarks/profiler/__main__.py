"""Is what CommProfiler says true, and what does it cost?

Two ranks on two hosts of harness/testbed.py. Planted are skew, time of a codec and rates of
links, beside which stands what the interfaces have sent; the clocks of the hosts are compared,
which are one; then the same step with and without the profiler, block by block.

    python -m benchmarks.profiler --json FILE [--only KIND] [--renew] [--rounds N] [--runs N]
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness.results import parser_of, recording
from benchmarks.harness.testbed import Testbed
from benchmarks.profiler import rank
from benchmarks.profiler.link_packets import noted, packets_of
from benchmarks.profiler.rows import ROWS, Row, medians_of
from benchmarks.profiler.tables import CLOCKS, COST, TRUTH, WIRE

Case = Mapping[str, Any]
"""Arguments of the function in `rank.py` that has the name of the kind."""

CODECS = ("ddp", "int8")
CASES: dict[str, Sequence[Case]] = {
    "skew": [{"codec": codec, "late_ms": [50.0, 100.0] * 20} for codec in CODECS],
    "codec": [{"planted_ms": planted, "steps": 20} for planted in (2.0, 10.0)],
    "wire": [{"codec": "ddp", "steps": 7}, {"codec": "int8", "steps": 12}],
    "clocks": [
        {"load": load, "readings": readings}
        for load, readings in (("idle", 100), ("both ways", 20), ("one way", 20))
    ],
    "cost": [
        {"codec": codec, "buckets": buckets, "step_ms": step_ms}
        for codec, steps_ms in (("ddp", (20.0, 50.0, 200.0)), ("int8", (50.0, 200.0)))
        for buckets, step_ms in itertools.product((1, 8, 40), steps_ms)
    ],
}
_LINKS = ((50.0, None), (50.0, "cubic"), (200.0, None), (1000.0, None))
"""Mbit/s and TCP's congestion control, None: the machine's own. At 50 Mbit/s steps are long, and
bbr does not fill the link all the time; cubic does."""
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_LIMIT_S = 400.0


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", dest="kinds", action="append", choices=CASES, help="repeatable")
    add("--renew", action="store_true", help="keep what FILE has of other kinds")
    add("--rounds", type=int, default=6, help="blocks with and without, of cost")
    add("--runs", type=int, default=3, help="of wire")
    given = parser.parse_args()
    given.kinds = given.kinds or [*CASES]
    if given.renew and not (given.json and given.json.exists()):
        parser.error("--renew needs the results to renew: --json with a file that exists")
    with recording(given, renew=given.renew) as record:
        for kind in given.kinds:
            for rows in _measured(kind, given.rounds, given.runs):
                record.add(rows, TRUTH, WIRE, CLOCKS, COST)


def _measured(kind: str, rounds: int, runs: int) -> Iterator[list[Row]]:
    """The rows of a kind, in one group or several."""
    cases = CASES[kind]
    if kind == "wire":
        yield medians_of([row for _ in range(runs) for row in _wire_runs()])
    elif kind == "cost":
        for codec in CODECS:
            of_codec = [{**case, "rounds": rounds} for case in cases if case["codec"] == codec]
            with Testbed(hosts=2, link_mbit=None) as testbed:
                yield run_cases(testbed, kind, of_codec)
    else:
        with Testbed(hosts=2, link_mbit=200.0 if kind == "clocks" else None) as testbed:
            yield run_cases(testbed, kind, cases)


def _wire_runs() -> Iterator[Row]:
    """Each link once: what disturbs the machine for a while disturbs all settings."""
    own = _CONGESTION_CONTROL.read_text().strip()
    for link, control in dict.fromkeys((link, control or own) for link, control in _LINKS):
        with Testbed(hosts=2, link_mbit=link, congestion_control=control) as testbed:
            for row in run_cases(testbed, "wire", CASES["wire"]):
                yield {"congestion_control": control, **row}


def run_cases(testbed: Testbed, kind: str, cases: Sequence[Case]) -> list[Row]:
    """All in the same processes, one on each host; of wire the packets are noted meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        parent = Path(directory)
        with noted(testbed, parent) if kind == "wire" else nullcontext():
            of_ranks = testbed.run(
                rank.run, timeout_s=_LIMIT_S, kind=kind, folder=directory, cases=cases
            )
        truths: list[Any] = list(zip(*of_ranks, strict=True))
        if kind == "wire":
            truths = [packets_of(parent, hosts=testbed.hosts)] * len(cases)
        return [
            row
            for number, (truth, case) in enumerate(zip(truths, cases, strict=True))
            for row in ROWS[kind](parent / str(number), truth, link_mbit=testbed.link_mbit, **case)
        ]


if __name__ == "__main__":
    main()
