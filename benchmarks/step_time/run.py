"""The run of a step-time benchmark: options, one set of processes over all links, results."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.launch import Gate, Layout, RankFailed
from benchmarks.harness.results import collect_meta, write_json
from benchmarks.harness.tables import of_link
from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from benchmarks.step_time.rows import (
    FEWEST_ROUNDS,
    GRADIENT_BYTES,
    MOST_ROUNDS,
    QUIET,
    RANK_MODULE,
    Settings,
)
from benchmarks.step_time.summary import JsonRow, Samples, show_link, summarize


def measure_rows(
    testbed: Testbed,
    arguments: argparse.Namespace,
    *,
    rows: Sequence[str],
    layout: Layout,
    reasons: dict[str, str],
) -> list[JsonRow]:
    """One set of processes with all rows, over all links, each shown as soon as it is done.

    reasons: the rows that cannot be measured, and why not.
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
            samples: Samples = json.loads(outputs[done].read_text())
            found = summarize(samples, layout=layout, link_mbit=links[done], reasons=reasons)
            show_link(found)
            measured.extend(found)
            done += 1

        def next_link() -> None:
            finish_link()
            testbed.set_link(links[done])
            say(f"link: {of_link(links[done])}")

        def on_poll() -> None:
            if done < len(links) - 1 and outputs[done].exists():
                gate.let_through(next_link)

        say(f"link: {of_link(links[0])}")
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


LINKS = (1000.0, 200.0, 50.0)  # fast first: the warm-up is cheap there
_SECONDS = 150.0  # for each link; what this buys at 50 Mbit/s is about three rounds
_SETUP_S = 900.0  # imports and, with a cold cache, compiling every codec's kernels
_USUAL_SETUP_S = 120.0
_MB_PER_RANK, _MB_PER_ROW = 700, 170  # measured with 8 rows on 4 ranks: 1.6 GB each
_SLOWEST_LINK_SHARE = 0.3  # a step that gets less of the link than this counts as hung


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
