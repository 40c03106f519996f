"""What the step-time benchmarks share: one set of processes over all links, and the whole run."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.launch import Gate, Layout, RankFailed
from benchmarks.harness.results import collect_meta, write_json
from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from benchmarks.step_time.rows import (
    FEWEST_ROUNDS,
    GRADIENT_BYTES,
    MOST_ROUNDS,
    NO_FEEDBACK_SUFFIX,
    QUIET,
    RANK_MODULE,
    Settings,
    is_torch_row,
)
from benchmarks.step_time.summary import link_name

JsonRow = dict[str, Any]
Samples = dict[str, list[dict[str, Any]]]


def measure_rows(
    testbed: Testbed,
    arguments: argparse.Namespace,
    *,
    rows: Sequence[str],
    layout: Layout,
    on_link: Callable[[Samples, float | None], list[JsonRow]],
) -> list[JsonRow]:
    """One set of processes with all rows, over all links.

    on_link: called with the samples of a link as soon as it is done; makes and shows its rows.
    """
    links: list[float | None] = arguments.link
    measured: list[JsonRow] = []
    with tempfile.TemporaryDirectory() as directory:
        gate = Gate(Path(directory) / "gate")
        outputs = [Path(directory) / f"samples{index}.json" for index in range(len(links))]
        settings = Settings(
            rows=list(rows),
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
            measured.extend(on_link(json.loads(outputs[done].read_text()), links[done]))
            done += 1

        def next_link() -> None:
            finish_link()
            testbed.set_link(links[done])
            say(f"link: {link_name(links[done])}")

        def on_poll() -> None:
            if done < len(links) - 1 and outputs[done].exists():
                gate.let_through(next_link)

        say(f"link: {link_name(links[0])}")
        testbed.launch(
            [sys.executable, "-m", RANK_MODULE, json.dumps(asdict(settings))],
            ranks_per_host=layout.counts,
            env=QUIET,
            timeout_s=time_limit_s(arguments, layout=layout, rows=len(settings.rows)),
            echo=True,
            on_poll=on_poll,
        )
        finish_link()
    return measured


def run_layouts(
    program: str,
    arguments: argparse.Namespace,
    *,
    layouts: Sequence[Layout],
    measure: Callable[[Layout], list[JsonRow]],
) -> None:
    """Measure one layout after the other, write what there is after each; exits on a failure."""
    listed = {name: value for name, value in vars(arguments).items() if name != "json"}
    meta = collect_meta(seed=arguments.seed, arguments=listed)
    rows: list[JsonRow] = []
    try:
        for layout in layouts:
            say(layout.title)
            rows += measure(layout)
            if arguments.json:  # after each, so that a failure of a later one loses nothing
                write_json(arguments.json, meta=meta, rows=rows)
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"{program}: {error}")
    if differing := [row["codec"] for row in rows if row["replicas_identical"] is False]:
        sys.exit(f"{program}: replicas differ with {', '.join(differing)}")


def say(text: str) -> None:
    """What is going on, beside the tables on stdout."""
    print(text, file=sys.stderr, flush=True)


HOSTS = (2, 4)
LINKS = (1000.0, 200.0, 50.0)  # fast first: the warm-up is cheap there
QUICK_HOSTS = (2,)
QUICK_LINKS = (None, 200.0)
WITHOUT_FEEDBACK = ("int8", "int4")
"""Codecs that by default are also measured without error feedback."""

_QUICK_ROUNDS = 4
_SECONDS = 150.0  # for each link; what this buys at 50 Mbit/s is about three rounds
_SETUP_S = 900.0  # imports and, with a cold cache, compiling every codec's kernels
_USUAL_SETUP_S = 120.0
_MB_PER_RANK, _MB_PER_ROW = 700, 170  # measured with 8 rows on 4 ranks: 1.6 GB each
_SLOWEST_LINK_SHARE = 0.3  # a step that gets less of the link than this counts as hung


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


def add_shared(parser: argparse.ArgumentParser) -> None:
    """The options of every step-time benchmark."""
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the rows here")
    add("--link", type=_link, action="append", metavar="MBIT", help="Mbit/s or none; repeatable")
    bounds = f"default: what --seconds buys, {FEWEST_ROUNDS} to {MOST_ROUNDS}"
    add("--rounds", type=positive, metavar="N", help=f"timed steps of each row; {bounds}")
    add("--seconds", type=float, default=_SECONDS, metavar="S", help="for each link (%(default)s)")
    add("--warmup", type=positive, default=3, metavar="N", help="untimed steps of the first link")
    add("--batch", type=positive, default=16, metavar="N", help="samples per rank and step")
    add("--seed", type=int, default=0, metavar="N")


def check_hosts(parser: argparse.ArgumentParser, hosts: int, *, links: list[float | None]) -> None:
    """End with a message where the test-bed cannot be made like this."""
    if hosts < 2:
        parser.error(f"at least 2 hosts are needed, got {hosts}: one host has no link")
    for link_mbit in links:
        try:
            Testbed(hosts, link_mbit=link_mbit)
        except ValueError as error:
            parser.error(str(error))


def time_limit_s(arguments: argparse.Namespace, *, layout: Layout, rows: int) -> float:
    """For one layout; generous: only a hang gets there."""
    rounds = arguments.warmup + (arguments.rounds or FEWEST_ROUNDS)
    limit_s = _SETUP_S
    for link_mbit in arguments.link:
        step_s = 2.0 * layout.world_size
        if link_mbit is not None:
            most_bit = 2 * 8 * GRADIENT_BYTES * max(layout.counts)
            step_s += most_bit / (link_mbit * 1e6 * _SLOWEST_LINK_SHARE)
        limit_s += max(rounds * rows * step_s, 2 * arguments.seconds)
    return limit_s


def estimate(arguments: argparse.Namespace, *, layouts: Sequence[Layout], rows: int) -> str:
    """Time and memory for people, before anything has been measured."""
    links = len(layouts) * len(arguments.link)
    if arguments.rounds is None:
        expected_s = len(layouts) * _USUAL_SETUP_S + links * arguments.seconds
        duration = (
            f"about {expected_s / 60:.0f} minutes (more where {FEWEST_ROUNDS} rounds take longer "
            f"than {arguments.seconds:g} s, and to compile the kernels for the first time)"
        )
    else:
        duration = f"{arguments.rounds} rounds for each of {links} combinations of hosts and link"
    ranks = max(layout.world_size for layout in layouts)
    needed_gb = ranks * (_MB_PER_RANK + rows * _MB_PER_ROW) / 1e3
    available_gb = _available_bytes() / 1e9
    memory = f"{needed_gb:.0f} GB of memory"
    if needed_gb > available_gb:
        memory += f", but only {available_gb:.0f} GB are free: name fewer codecs or hosts"
    return f"{rows} rows, {duration}, {memory}"


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def positive(text: str) -> int:
    """An option that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _link(text: str) -> float | None:
    return None if text == "none" else float(text)
