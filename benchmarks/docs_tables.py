"""Writes the measured tables of README.md and docs/ from the JSON of the benchmarks.

    python -m benchmarks.docs_tables            # or `make tables`
    python -m benchmarks.docs_tables --check    # exit status 1 where a document is not up to date

Measures nothing. A document says where a table belongs:

    <!-- measured:NAME -->
    ... whatever stands here is replaced ...
    <!-- /measured:NAME -->

NAME is one of `SECTIONS`, the text comes from `benchmarks/docs_others.py`. Where the results of a
section are missing, what stands in the document stays, and a line on stderr says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import docs_others as tables
from benchmarks import docs_profiling as profiling

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "docs/choosing-a-codec.md",
    "docs/hierarchical.md",
    "docs/checkpoints.md",
    "docs/elastic.md",
    "docs/profiling.md",
)

Section = tuple[str, Callable[[Mapping[str, Any]], str | None]]

SECTIONS: dict[str, Section] = {
    "steps-2-hosts": ("allreduce", partial(tables.step_times, hosts=2)),
    "steps-4-hosts": ("allreduce", partial(tables.step_times, hosts=4)),
    "hierarchical": ("hierarchical", tables.forms),
    "hierarchical-curve": ("hierarchical_model", tables.curve),
    "kernels": ("codecs", tables.kernels),
    "memory": ("codecs", tables.memory),
    "convergence-gpt": ("convergence", partial(tables.convergence, task="gpt")),
    "convergence-gpt-long": ("convergence_long", partial(tables.convergence, task="gpt")),
    "convergence-digits": ("convergence", partial(tables.convergence, task="digits")),
    "checkpoint": ("checkpoint", tables.checkpoint),
    "crash-campaign": ("crash_campaign", tables.crash_campaign),
    "restart-campaign": ("faults_restart", tables.campaign),
    "restart-loop": ("faults_restart_loop", tables.loop_campaign),
    "restart-figures": ("faults_figures", tables.figures),
    "restart-rendezvous": ("restart_rendezvous", tables.rendezvous),
    "elastic-overhead": ("elastic_overhead", tables.overhead),
    "profile-truth": ("profiling", profiling.truth),
    "profile-wire": ("profiling", profiling.wire),
    "profile-clocks": ("profiling", profiling.clocks),
    "profile-cost": ("profiling", profiling.cost),
    "profile-outputs": ("profiling", profiling.outputs),
    "whatif-errors": ("whatif", tables.errors),
    "whatif-scaling": ("whatif", tables.scaling),
    "time-to-accuracy": ("time_to_accuracy", tables.time_to_accuracy),
}
"""The name in a document -> the results it needs, and what makes a table of them."""

_SECTION = re.compile(
    r"(?P<start><!-- measured:(?P<name>[\w-]+) -->\n).*?(?P<end><!-- /measured:(?P=name) -->)",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- /?measured:")


class DocumentError(ValueError):
    """A document has markers that no table belongs to, or that do not pair."""


def render(text: str, results: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The document with fresh tables, and why some sections were left as they are.

    results: the content of the JSON files by name without `.json`, those that exist.
    """
    left: list[str] = []

    def fresh(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in SECTIONS:
            raise DocumentError(f"no section {name!r}; there are: {', '.join(SECTIONS)}")
        source, make = SECTIONS[name]
        if source not in results:
            left.append(f"{name}: no {source}.json")
            return match[0]
        body = make(results[source])
        if body is None:
            left.append(f"{name}: {source}.json has no such rows")
            return match[0]
        return f"{match['start']}{body}\n{match['end']}"

    if len(_MARKER.findall(text)) != 2 * len(_SECTION.findall(text)):
        raise DocumentError("a <!-- measured:NAME --> and its <!-- /measured:NAME --> do not pair")
    return _SECTION.sub(fresh, text), left


def load_results(directory: Path) -> dict[str, dict[str, Any]]:
    """The results that exist."""
    names = sorted({source for source, _ in SECTIONS.values()})
    paths = {name: directory / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main(argv: list[str] | None = None) -> None:
    """Write or check all documents."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, tell by exit status")
    parser.add_argument(
        "--results", type=Path, default=REPOSITORY / "benchmarks" / "results", metavar="DIRECTORY"
    )
    arguments = parser.parse_args(argv)
    results = load_results(arguments.results)
    stale = []
    for name in DOCUMENTS:
        path = REPOSITORY / name
        if not path.exists():
            _say(f"{name}: there is no such file")
            continue
        before = path.read_text()
        try:
            after, left = render(before, results)
        except DocumentError as error:
            sys.exit(f"benchmarks/docs_tables.py: {name}: {error}")
        for line in left:
            _say(f"{name}: left as it is: {line}")
        if after == before:
            continue
        stale.append(name)
        if not arguments.check:
            path.write_text(after)
            _say(f"{name}: written")
    if arguments.check and stale:
        sys.exit(f"benchmarks/docs_tables.py: {', '.join(stale)} not up to date; run `make tables`")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
