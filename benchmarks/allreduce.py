"""How long a training step takes on a slow link, with each codec beside what torch itself offers.

    python -m benchmarks.allreduce [--quick] [--hosts 2] [--link 200 --link none] [--json PATH]

Several hosts on one machine (`benchmarks/testbed.py`; needs root), a DDP model of
10 x Linear(1024, 1024) (42 MB of fp32 gradients, DDP's default buckets), SGD. For each number of
hosts one set of processes holds all rows: every row has a DDP instance of its own in it, and the
rows take turns step by step, a different one first in each round. Between links the processes stay
and only the limit changes. Rows:

    no-comm          the same step under `no_sync`: compute only, the floor for every other row
    ddp              DistributedDataParallel as it is, fp32
    torch-fp16-hook  with torch's own `fp16_compress_hook`
    torch-powersgd, torch-quant-pertensor, torch-quant-perchannel
                     with torch's hooks of these names (PowerSGD: rank 4, from the third step on);
                     tried in processes of their own before (`benchmarks/allreduce_probe.py`), and
                     where one fails there its figures are null and `reason` says why
    NAME             with `lightning_dist.compress_ddp(ddp, NAME)`, default options: for sparse and
                     low-rank codecs these choose how much is sent. By default every codec there is
    NAME-noef        the same without error feedback

What is measured:

    step_ms        from before the forward to after the optimizer step, of the slowest rank, with
                   barriers before and after that are not in the time; median, p10, p90 of `rounds`
                   rounds: on a slow link few, as many as fit into --seconds
    wire_bytes     bytes sent in a step by host 0 divided by its ranks, from its interface's own
                   counter: with headers, acknowledgements and the barrier (some 100 bytes)
    counted_wire_bytes
                   the same by lightning_dist's own counters, which see no headers: sent to other
                   hosts by the ranks of host 0, per rank; null for torch's rows
    raw_bytes      what an fp32 allreduce would send per rank, within hosts too: our counter of rank
                   0; for torch's rows 2 (W - 1) / W times the gradients
    wire_limit_pct (bytes sent by host 0 / link rate) / (median step - median no-comm step) x 100:
                   how much of the link is used in the time that communication adds to the step.
                   Time in which communication hides behind the backward pass is not in the
                   denominator, so good overlap can bring it above 100; headers that the counter
                   does not see keep plain TCP at about 96 without overlap
    bound_ms       median no-comm step + bytes sent by host 0 / link rate: the step if encoding cost
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
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: let `benchmarks` be found, as with `python -m`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.allreduce_arguments import estimate, parse_arguments, time_limit_s
from benchmarks.allreduce_probe import QUIET, RANK_MODULE, probe_baselines, reason_of
from benchmarks.allreduce_settings import BASELINES, Settings
from benchmarks.allreduce_summary import link_name, show, summarize
from benchmarks.gate import Gate
from benchmarks.ranks import RankFailed
from benchmarks.report import collect_meta, write_json
from benchmarks.testbed import Testbed, TestbedUnavailable

JsonRow = dict[str, Any]


def measure(arguments: argparse.Namespace, *, hosts: int) -> list[JsonRow]:
    """All links on this many hosts: the rows of the JSON."""
    _say(f"{hosts} hosts x {arguments.ranks_per_host} ranks")
    with Testbed(hosts, link_mbit=arguments.link[0]) as testbed:
        risky: list[str] = []
        reasons: dict[str, str] = {}
        if not arguments.quick:
            risky, reasons = probe_baselines(
                testbed, ranks_per_host=arguments.ranks_per_host, batch=arguments.batch, say=_say
            )
        try:
            return _measure_together(testbed, arguments, risky=risky, reasons=reasons)
        except RankFailed as error:
            # What worked alone may still meet the wrong collective among twenty others: without it
            # the rest is measured again, and an error of ours then ends the run as it should.
            if not risky:
                raise
            reason = f"worked alone, ended the common run: {reason_of(error)}"
            _say(f"  {', '.join(risky)}: {reason}")
            reasons |= {row: reason for row in risky}
            testbed.set_link(arguments.link[0])
            return _measure_together(testbed, arguments, risky=[], reasons=reasons)


def _measure_together(
    testbed: Testbed, arguments: argparse.Namespace, *, risky: list[str], reasons: dict[str, str]
) -> list[JsonRow]:
    """One set of processes with all rows, over all links. Shows a link's table when it is done."""
    links: list[float | None] = arguments.link
    measured: list[JsonRow] = []
    with tempfile.TemporaryDirectory() as directory:
        gate = Gate(Path(directory) / "gate")
        outputs = [Path(directory) / f"samples{index}.json" for index in range(len(links))]
        settings = Settings(
            rows=[*BASELINES, *risky, *arguments.codec],
            outputs=[str(path) for path in outputs],
            gate=str(gate.path),
            warmup=arguments.warmup,
            rounds=arguments.rounds,
            seconds=arguments.seconds,
            batch=arguments.batch,
            seed=arguments.seed,
        )
        done = 0

        def finish_link() -> None:
            nonlocal done
            rows = summarize(
                json.loads(outputs[done].read_text()),
                hosts=testbed.hosts,
                ranks_per_host=arguments.ranks_per_host,
                link_mbit=links[done],
                reasons=reasons,
            )
            show(rows)
            measured.extend(rows)
            done += 1

        def next_link() -> None:
            finish_link()
            testbed.set_link(links[done])
            _say(f"link: {link_name(links[done])}")

        def on_poll() -> None:
            if done < len(links) - 1 and outputs[done].exists():
                gate.let_through(next_link)

        _say(f"link: {link_name(links[0])}")
        testbed.launch(
            [sys.executable, "-m", RANK_MODULE, json.dumps(asdict(settings))],
            ranks_per_host=arguments.ranks_per_host,
            env=QUIET,
            timeout_s=time_limit_s(arguments, hosts=testbed.hosts, rows=len(settings.rows)),
            echo=True,
            on_poll=on_poll,
        )
        finish_link()
    return measured


def main(argv: list[str] | None = None) -> None:
    """Measure, show, and write."""
    arguments = parse_arguments(argv)
    listed = {name: value for name, value in vars(arguments).items() if name != "json"}
    meta = collect_meta(seed=arguments.seed, arguments=listed)
    _say(estimate(arguments))
    rows: list[JsonRow] = []
    try:
        for hosts in arguments.hosts:
            rows += measure(arguments, hosts=hosts)
            if arguments.json:  # after each, so that a failure on more hosts loses nothing
                write_json(arguments.json, meta=meta, rows=rows)
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"benchmarks/allreduce.py: {error}")
    if differing := [row["codec"] for row in rows if row["replicas_identical"] is False]:
        sys.exit(f"benchmarks/allreduce.py: replicas differ with {', '.join(differing)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
