"""Writes the tables and figures of README.md and docs/: those of the benchmarks, and of arguments.

    python -m benchmarks.docs_tables            # or `make tables`
    python -m benchmarks.docs_tables --check    # exit status 1 where a document is not up to date

Measures nothing. A document says where a table belongs:

    <!-- measured:NAME -->
    ... whatever stands here is replaced ...
    <!-- /measured:NAME -->

NAME is one of `SECTIONS`. What the figures mean is in the benchmark that measured them. With
`arguments` in the place of `measured`, it is one of `arguments.TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import arguments, codecs
from benchmarks.checkpoint import tables as checkpoint
from benchmarks.convergence.tables import convergence, time_to_accuracy
from benchmarks.figures import FIGURES
from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.tables import Result
from benchmarks.profiler import tables as profiler
from benchmarks.restart import tables as restart
from benchmarks.step_time.tables import choice, forms, local_steps, overview, sharded, step_times

_OF_ARGUMENTS = ("checkpoints", "elastic", "fsdp2", "hierarchical", "local-steps", "profiling")
DOCUMENTS = (
    "README.md",
    "docs/choosing-a-codec.md",
    "benchmarks/results/README.md",
    *(f"docs/{page}.md" for page in _OF_ARGUMENTS),
)


SECTIONS: dict[str, tuple[str | tuple[str, ...], Callable[..., str | None]]] = {
    "overview": (("allreduce", "convergence"), overview),
    "choice": (("allreduce", "convergence"), choice),
    "steps-2-hosts": ("allreduce", partial(step_times, hosts=2)),
    "steps-4-hosts": ("allreduce", partial(step_times, hosts=4)),
    "fsdp": ("fsdp", sharded),
    "fsdp-gpt": ("fsdp_gpt", sharded),
    "hierarchical": ("hierarchical", forms),
    "kernels": ("codecs", codecs.KERNELS),
    "memory": ("codecs", codecs.MEMORY),
    "convergence-gpt": ("convergence", partial(convergence, task="gpt")),
    "convergence-gpt-long": ("convergence_long", partial(convergence, task="gpt")),
    "convergence-digits": ("convergence", partial(convergence, task="digits")),
    "convergence-local": ("convergence_local", partial(convergence, task="gpt")),
    "convergence-local-long": ("convergence_local_long", partial(convergence, task="gpt")),
    "convergence-local-long-tuned": (
        "convergence_local_long_tuned",
        partial(convergence, task="gpt"),
    ),
    "convergence-local-tuned": ("convergence_local_tuned", partial(convergence, task="gpt")),
    "convergence-local-overlap": ("convergence_local_overlap", partial(convergence, task="gpt")),
    "convergence-fsdp": ("convergence_fsdp", partial(convergence, task="gpt")),
    "checkpoint": ("checkpoint", checkpoint.checkpoint),
    "crash-campaign": ("crash_campaign", checkpoint.CRASH_CAMPAIGN),
    "restart-campaign": ("faults_restart", restart.CAMPAIGN),
    "restart-loop": ("faults_restart_loop", restart.LOOP_CAMPAIGN),
    "restart-resume": ("restart_resume", restart.RESUME),
    "restart-in-process": ("restart_in_process", restart.IN_PROCESS),
    "restart-in-process-others": ("restart_in_process", restart.IN_PROCESS_OTHERS),
    "restart-rendezvous": ("restart_rendezvous", restart.RENDEZVOUS),
    "elastic-overhead": ("elastic_overhead", restart.OVERHEAD),
    "profile-truth": ("profiling", profiler.TRUTH),
    "profile-wire": ("profiling", profiler.WIRE),
    "profile-clocks": ("profiling", profiler.CLOCKS),
    "profile-cost": ("profiling", profiler.COST),
    "whatif-errors": ("whatif", profiler.WHATIF_ERRORS),
    "whatif-scaling": ("whatif", profiler.WHATIF_SCALING),
    "whatif-fsdp": ("whatif_fsdp", profiler.WHATIF_FSDP),
    "local-throughput": ("local_throughput", local_steps),
    "convergence-delay": ("convergence_delay", partial(convergence, task="gpt")),
    "delay": ("delay", time_to_accuracy),
    "local-steps": ("local_steps", time_to_accuracy),
    "local-steps-100": ("local_steps_100", time_to_accuracy),
    "time-to-accuracy": ("time_to_accuracy", time_to_accuracy),
}
"""The name in a document -> the result or results it needs, and the function that renders them."""


_SECTION = re.compile(
    r"(?P<start><!-- (?P<kind>measured|arguments):(?P<name>[\w-]+) -->\n).*?"
    r"(?P<end><!-- /(?P=kind):(?P=name) -->)",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- /?(measured|arguments):")


def render(text: str, results: Mapping[str, Result]) -> str:
    """The document with fresh tables.

    results: the content of the JSON files by name without `.json`.
    """

    def fresh(match: re.Match[str]) -> str:
        if match["kind"] == "arguments":
            return f"{match['start']}{arguments.table(match['name'])}\n{match['end']}"
        source, make = SECTIONS[match["name"]]
        sources = (source,) if isinstance(source, str) else source
        body = make(*(results[name] for name in sources))
        if body is None:
            files = " and ".join(f"{name}.json" for name in sources)
            raise ValueError(f"{files}: no rows for the table {match['name']}")
        return f"{match['start']}{body}\n{match['end']}"

    if len(_MARKER.findall(text)) != 2 * len(_SECTION.findall(text)):
        raise ValueError("a <!-- measured:NAME --> and its <!-- /measured:NAME --> do not pair")
    return _SECTION.sub(fresh, text)


def load_results(directory: Path) -> dict[str, Result]:
    """The results that exist."""
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}


def main() -> None:
    """Write or check all documents."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, tell by exit status")
    check = parser.parse_args().check
    results = load_results(REPOSITORY / "benchmarks" / "results")
    fresh = {name: render((REPOSITORY / name).read_text(), results) for name in DOCUMENTS}
    fresh |= {name: draw(results) for name, draw in FIGURES.items()}
    stale = []
    for name, after in fresh.items():
        path = REPOSITORY / name
        if not path.exists() or path.read_text() != after:
            stale.append(path.name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(after)
    if stale:
        print(", ".join(stale), "not up to date" if check else "written", file=sys.stderr)
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
