"""How long a training step takes on a slow link, with each codec beside what torch itself offers.

    python benchmarks/allreduce.py [--quick] [--link 200 --link none] [--json PATH]

Several hosts on one machine (`benchmarks/testbed.py`; needs root), a DDP model of
10 x Linear(1024, 1024) (42 MB of fp32 gradients, DDP's default buckets), SGD. One run holds all
rows: every row has a DDP instance of its own in the same processes, and the rows take turns step by
step, a different one first in each round. Between links the processes stay and only the limit
changes. Rows:

    no-comm          the same step under `no_sync`: compute only, the floor for every other row
    ddp              DistributedDataParallel as it is, fp32
    torch-fp16-hook  with torch's own `fp16_compress_hook`
    NAME             with `lightning_dist.compress_ddp(ddp, NAME)`
    NAME-noef        the same without error feedback

What is measured:

    step_ms        from before the forward to after the optimizer step, of the slowest rank, with
                   barriers before and after that are not in the time; median, p10, p90 of rounds
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

from benchmarks.allreduce_settings import BASELINES, GRADIENT_BYTES, Settings
from benchmarks.allreduce_summary import link_name, show, summarize
from benchmarks.gate import Gate
from benchmarks.ranks import RankFailed
from benchmarks.report import collect_meta, write_json
from benchmarks.testbed import Testbed, TestbedUnavailable

CODECS = ("none", "fp16", "bf16", "int8", "int8-noef")
LINKS = (None, 1000.0, 200.0)  # without a limit first: the slow warm-up is cheap there
QUICK_LINKS = (None, 200.0)
_SETUP_S = 300.0  # imports and, with a cold cache, compiling every codec's kernels
_SLOWEST_LINK_SHARE = 0.3  # a step that gets less of the link than this counts as hung


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One run over all links: the rows of the JSON. Shows each link's table when it is done."""
    links: list[float | None] = arguments.link
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        Testbed(arguments.hosts, link_mbit=links[0]) as testbed,
    ):
        gate = Gate(Path(directory) / "gate")
        outputs = [Path(directory) / f"samples{index}.json" for index in range(len(links))]
        settings = Settings(
            rows=[*BASELINES, *arguments.codec],
            outputs=[str(path) for path in outputs],
            gate=str(gate.path),
            warmup=arguments.warmup,
            rounds=arguments.rounds,
            batch=arguments.batch,
            seed=arguments.seed,
        )
        done = 0

        def finish_link() -> None:
            nonlocal done
            samples = json.loads(outputs[done].read_text())
            of_link = summarize(
                samples,
                hosts=arguments.hosts,
                ranks_per_host=arguments.ranks_per_host,
                link_mbit=links[done],
            )
            show(of_link)
            rows.extend(of_link)
            done += 1

        def next_link() -> None:
            finish_link()
            testbed.set_link(links[done])
            _announce(links[done])

        def on_poll() -> None:
            if done < len(links) - 1 and outputs[done].exists():
                gate.let_through(next_link)

        _announce(links[0])
        testbed.launch(
            [sys.executable, "-m", "benchmarks.allreduce_rank", json.dumps(asdict(settings))],
            ranks_per_host=arguments.ranks_per_host,
            env={"TORCH_CPP_LOG_LEVEL": "ERROR"},  # it warns that 10.77.0.1 has no name
            timeout_s=_time_limit_s(arguments),
            echo=True,
            on_poll=on_poll,
        )
        finish_link()
    return rows


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults that depend on --quick filled in."""
    parser = argparse.ArgumentParser(
        description="Time of a DDP training step on a slow link, per codec."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two minutes: fewer rounds, 200 Mbit/s and no limit")
    add("--json", type=Path, metavar="PATH", help="write the rows here")
    add("--hosts", type=_positive, default=2, metavar="N")
    add("--ranks-per-host", type=_positive, default=1, metavar="N")
    add("--link", type=_link, action="append", metavar="MBIT", help="Mbit/s or none; repeatable")
    add("--codec", action="append", metavar="NAME", help="of lightning_dist; repeatable")
    add("--baselines-only", action="store_true", help="only torch's own rows")
    add("--rounds", type=_positive, metavar="N", help="timed steps of each row (20, quick: 4)")
    add(
        "--warmup",
        type=_positive,
        default=2,
        metavar="N",
        help="untimed steps before, 1 after the first link",
    )
    add("--batch", type=_positive, default=16, metavar="N", help="samples per rank and step")
    add("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args(argv)
    arguments.link = arguments.link or list(QUICK_LINKS if arguments.quick else LINKS)
    arguments.rounds = arguments.rounds or (4 if arguments.quick else 20)
    if arguments.baselines_only and arguments.codec:
        parser.error("--baselines-only and --codec exclude each other")
    if arguments.hosts < 2:
        parser.error(f"--hosts must be at least 2, got {arguments.hosts}: one host has no link")
    for link_mbit in arguments.link:
        try:
            Testbed(arguments.hosts, link_mbit=link_mbit)
        except ValueError as error:
            parser.error(str(error))
    codecs = [] if arguments.baselines_only else arguments.codec or CODECS
    arguments.codec = list(dict.fromkeys(codecs))
    if taken := set(arguments.codec) & set(BASELINES):
        parser.error(f"--codec: {', '.join(taken)} is always measured; name codecs of ours")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Measure, show, and write."""
    arguments = parse_arguments(argv)
    listed = {name: value for name, value in vars(arguments).items() if name != "json"}
    meta = collect_meta(seed=arguments.seed, arguments=listed)
    try:
        rows = measure(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"benchmarks/allreduce.py: {error}")
    if arguments.json:
        write_json(arguments.json, meta=meta, rows=rows)
    if differing := [row["codec"] for row in rows if row["replicas_identical"] is False]:
        sys.exit(f"benchmarks/allreduce.py: replicas differ with {', '.join(differing)}")


def _announce(link_mbit: float | None) -> None:
    print(f"link: {link_name(link_mbit)}", file=sys.stderr)


def _time_limit_s(arguments: argparse.Namespace) -> float:
    """Generous: only a hang gets there."""
    ranks_per_host: int = arguments.ranks_per_host
    steps = (arguments.warmup + arguments.rounds) * (len(BASELINES) + len(arguments.codec))
    limit_s = _SETUP_S
    for link_mbit in arguments.link:
        step_s = 2.0 * arguments.hosts * ranks_per_host
        if link_mbit is not None:
            most_bit = 2 * 8 * GRADIENT_BYTES * ranks_per_host
            step_s += most_bit / (link_mbit * 1e6 * _SLOWEST_LINK_SHARE)
        limit_s += steps * step_s
    return limit_s


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _link(text: str) -> float | None:
    return None if text == "none" else float(text)


if __name__ == "__main__":
    main()
