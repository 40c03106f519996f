"""Which of torch's riskier hooks work here: each is tried in a short launch of its own.

torch's PowerSGD and quantization hooks start further collectives from the callback of the first
one. With several buckets two ranks may start them in another order, and gloo then ends the process
or waits for ever. Where PowerSGD fails with DDP's default buckets it gets a second try with all
gradients in one bucket, as a row of its own: no overlap with the backward pass, but no order to get
wrong.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.allreduce_settings import (
    ONE_BUCKET_SUFFIX,
    POWERSGD_ROW,
    RISKY_BASELINES,
    Settings,
)
from benchmarks.ranks import RankFailed, RanksTimedOut
from benchmarks.testbed import Testbed

RANK_MODULE = "benchmarks.allreduce_rank"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that 10.77.0.1 has no name

_TIMEOUT_S = 45.0
_LINK_MBIT = 1000.0  # also for runs on slower ones: PowerSGD's first two steps are plain fp32
_WARMUP, _ROUNDS = 3, 8  # a wrong order is a matter of luck, so not too few
_SLOWEST_STEP_S = 10.0
_TELLING = re.compile(r"error|what\(\)|enforce|abort|signal", re.IGNORECASE)
_CONSEQUENCE = re.compile(r"reset by peer|closed by peer|broken pipe", re.IGNORECASE)
_PREFIX = re.compile(
    r"^(\[rank\d+\]: |what\(\): +|\w+Error: (?=Got the following)"
    r"|Got the following error when running the callback: )+"
)
_LONGEST_REASON = 240


def probe_baselines(
    testbed: Testbed, *, ranks_per_host: int, batch: int, say: Callable[[str], None]
) -> tuple[list[str], dict[str, str]]:
    """The risky rows that work, and why the others do not."""
    works: list[str] = []
    reasons: dict[str, str] = {}
    link_mbit = testbed.link_mbit
    testbed.set_link(_LINK_MBIT)
    for hook in RISKY_BASELINES:
        rows = [hook, hook + ONE_BUCKET_SUFFIX] if hook == POWERSGD_ROW else [hook]
        for row in rows:
            reason = _probe(testbed, row, ranks_per_host=ranks_per_host, batch=batch)
            say(f"  {row}: {reason or 'works'}")
            if reason is None:
                works.append(row)
                break
            reasons[row] = reason
    testbed.set_link(link_mbit)
    return works, reasons


def reason_of(error: RankFailed) -> str:
    """One line of what the ranks said: the last that looks like the cause, else what ended."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines[1:] if _TELLING.search(line)]
    causes = [line for line in telling if not _CONSEQUENCE.search(line)]
    if isinstance(error, RanksTimedOut) or not telling:
        return lines[0]
    return _PREFIX.sub("", (causes or telling)[-1])[:_LONGEST_REASON]


def _probe(testbed: Testbed, row: str, *, ranks_per_host: int, batch: int) -> str | None:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "samples.json"
        settings = Settings(
            rows=[row],
            outputs=[str(output)],
            gate="",
            warmup=_WARMUP,
            rounds=_ROUNDS,
            seconds=0.0,
            batch=batch,
            seed=0,
        )
        try:
            testbed.launch(
                [sys.executable, "-m", RANK_MODULE, json.dumps(asdict(settings))],
                ranks_per_host=ranks_per_host,
                env=QUIET,
                timeout_s=_TIMEOUT_S,
            )
        except RankFailed as error:
            return reason_of(error)
        samples = json.loads(output.read_text())[row]
    step_s = median(sample["step_s"] for sample in samples)
    if step_s > _SLOWEST_STEP_S:
        return f"a step takes {step_s:.0f} s, more than the {_SLOWEST_STEP_S:.0f} s allowed"
    return None
