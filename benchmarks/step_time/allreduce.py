"""How long a training step takes on a slow link, with each codec beside what torch itself offers.

    python -m benchmarks.step_time.allreduce [--quick] [--hosts 2] [--link 200] [--json PATH]

Several hosts on one machine (`harness/testbed.py`; needs root), a DDP model of
10 x Linear(1024, 1024) (42 MB of fp32 gradients, DDP's default buckets), SGD. For each number of
hosts one set of processes holds all rows: every row has a DDP instance of its own in it, and the
rows take turns step by step, a different one first in each round. Between links the processes stay
and only the limit changes. Rows:

    no-comm          the same step under `no_sync`: compute only, the floor for every other row
    ddp              DistributedDataParallel as it is, fp32
    torch-fp16-hook  with torch's own `fp16_compress_hook`
    torch-powersgd, torch-quant-pertensor, torch-quant-perchannel
                     with torch's hooks of these names (PowerSGD: rank 4, from the third step on);
                     tried in processes of their own before, and
                     where one fails there its figures are null and `reason` says why
    NAME             with `lightning_dist.compress_ddp(ddp, NAME)`, default options: for sparse and
                     low-rank codecs these choose how much is sent. By default every codec there is
    NAME-noef        the same without error feedback

What is measured:

    step_ms        from before the forward to after the optimizer step, of the slowest rank, with
                   barriers before and after that are not in the time; median, p10, p90 of `rounds`
                   rounds: on a slow link few, as many as fit into --seconds
    wire_bytes     bytes sent in a step by the host that sends most (here all send alike) divided by
                   its ranks, from its interface's own counter: with headers, acknowledgements and
                   the barrier (some 100 bytes)
    counted_wire_bytes
                   the same by lightning_dist's own counters, which see no headers: sent to other
                   hosts by the ranks of such a host, per rank; null for torch's rows
    raw_bytes      what an fp32 allreduce would send per rank, within hosts too: our counter of rank
                   0; for torch's rows 2 (W - 1) / W times the gradients
    wire_limit_pct (bytes sent by a host / link rate) / (median step - median no-comm step) x 100:
                   how much of the link is used in the time that communication adds to the step.
                   Time in which communication hides behind the backward pass is not in the
                   denominator, so good overlap can bring it above 100; headers that the counter
                   does not see keep plain TCP at about 96 without overlap
    bound_ms       median no-comm step + bytes sent by a host / link rate: the step if encoding cost
                   nothing and nothing overlapped, for orientation
    replicas_identical
                   whether after every timed step all ranks held the same parameters, bit by bit
                   (null for no-comm, which does not try)

Hosts share the machine's cores, so compute, codecs and the kernel's network code compete: with more
ranks than cores the times are an upper bound.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness.launch import Layout, RankFailed, RanksTimedOut
from benchmarks.harness.testbed import Testbed
from benchmarks.step_time.rows import (
    BASELINES,
    NO_FEEDBACK_SUFFIX,
    ONE_BUCKET_SUFFIX,
    POWERSGD_ROW,
    QUIET,
    RANK_MODULE,
    RISKY_BASELINES,
    Settings,
    is_torch_row,
)
from benchmarks.step_time.run import (
    LINKS,
    JsonRow,
    add_shared,
    check_hosts,
    estimate,
    measure_rows,
    positive,
    run_layouts,
    say,
)

HOSTS = (2, 4)
QUICK_HOSTS = (2,)
QUICK_LINKS = (None, 200.0)
WITHOUT_FEEDBACK = ("int8", "int4")
"""Codecs that by default are also measured without error feedback."""

_QUICK_ROUNDS = 4


def measure(layout: Layout, *, arguments: argparse.Namespace) -> list[JsonRow]:
    """All links on this many hosts: the rows of the JSON."""
    with Testbed(layout.hosts, link_mbit=arguments.link[0]) as testbed:
        risky: list[str] = []
        reasons: dict[str, str] = {}
        if not arguments.quick:
            risky, reasons = probe_baselines(
                testbed, ranks_per_host=arguments.ranks_per_host, batch=arguments.batch, say=say
            )

        together = partial(measure_rows, testbed, arguments, layout=layout, reasons=reasons)
        try:
            return together(rows=[*BASELINES, *risky, *arguments.codec])
        except RankFailed as error:
            # What worked alone may still meet the wrong collective among twenty others: without it
            # the rest is measured again, and an error of ours then ends the run as it should.
            if not risky:
                raise
            reason = f"worked alone, ended the common run: {reason_of(error)}"
            say(f"  {', '.join(risky)}: {reason}")
            reasons |= {row: reason for row in risky}
            testbed.set_link(arguments.link[0])
            return together(rows=[*BASELINES, *arguments.codec])


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults that depend on --quick filled in."""
    parser = argparse.ArgumentParser(
        description="Time of a DDP training step on a slow link, per codec."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="2 hosts, few rounds, none of torch's risky hooks")
    add("--hosts", type=positive, action="append", metavar="N", help="repeatable (2 and 4)")
    add("--ranks-per-host", type=positive, default=1, metavar="N")
    add("--codec", action="append", metavar="NAME", help="of lightning_dist; repeatable")
    add("--baselines-only", action="store_true", help="only torch's own rows")
    add_shared(parser)
    arguments = parser.parse_args(argv)
    arguments.hosts = arguments.hosts or list(QUICK_HOSTS if arguments.quick else HOSTS)
    arguments.link = arguments.link or list(QUICK_LINKS if arguments.quick else LINKS)
    arguments.rounds = arguments.rounds or (_QUICK_ROUNDS if arguments.quick else None)
    if arguments.baselines_only and arguments.codec:
        parser.error("--baselines-only and --codec exclude each other")
    for hosts in arguments.hosts:
        check_hosts(parser, hosts, links=arguments.link)
    codecs = [] if arguments.baselines_only else arguments.codec or default_codecs()
    arguments.codec = list(dict.fromkeys(codecs))
    if taken := [row for row in arguments.codec if is_torch_row(row)]:
        parser.error(f"--codec: {', '.join(taken)} is measured anyway; name codecs of ours")
    return arguments


def default_codecs() -> list[str]:
    """Every codec there is with its default options, and some without error feedback too."""
    from lightning_dist.codecs import CODECS

    rows: list[str] = []
    for name in CODECS:
        rows += [name, name + NO_FEEDBACK_SUFFIX] if name in WITHOUT_FEEDBACK else [name]
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, show, and write."""
    arguments = parse_arguments(argv)
    layouts = [Layout.of(arguments.ranks_per_host, hosts=hosts) for hosts in arguments.hosts]
    rows = len(BASELINES) + 1 + len(arguments.codec)  # of torch's risky hooks about one works
    say(estimate(arguments, layouts=layouts, rows=rows))
    run_layouts(
        "step_time.allreduce",
        arguments,
        layouts=layouts,
        measure=partial(measure, arguments=arguments),
    )


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


if __name__ == "__main__":
    main()
