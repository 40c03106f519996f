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

from benchmarks.allreduce_arguments import time_limit_s
from benchmarks.allreduce_probe import QUIET, RANK_MODULE
from benchmarks.allreduce_settings import Settings
from benchmarks.allreduce_summary import link_name
from benchmarks.gate import Gate
from benchmarks.layouts import Layout
from benchmarks.ranks import RankFailed
from benchmarks.report import collect_meta, write_json
from benchmarks.testbed import Testbed, TestbedUnavailable

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
