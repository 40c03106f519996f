"""Writes the tables and figures of README.md and docs/: those of the benchmarks, and of arguments.

    python -m benchmarks.docs_tables            # or `make tables`
    python -m benchmarks.docs_tables --check    # exit status 1 where a document is not up to date

Measures nothing. A document says where a table belongs:

    <!-- measured:NAME -->
    ... whatever stands here is replaced ...
    <!-- /measured:NAME -->

NAME is one of `SECTIONS`. What the figures mean is in the benchmark that measured them. With
`arguments` in the place of `measured`, it is one of `ARGUMENTS`, from signatures and docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from benchmarks import codecs, versions
from benchmarks.checkpoint import tables as checkpoint
from benchmarks.convergence.tables import TIME_TO_ACCURACY, convergence
from benchmarks.figures import FIGURES
from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.tables import Result
from benchmarks.profiler import tables as profiler
from benchmarks.restart import tables as restart
from benchmarks.step_time.tables import (
    LOCAL_STEPS,
    choice,
    forms,
    overview,
    sharded,
    step_times,
)

_OF_ARGUMENTS = ("checkpoints", "elastic", "fsdp2", "hierarchical", "local-steps", "profiling")
DOCUMENTS = (
    "README.md",
    "docs/choosing-a-codec.md",
    "docs/install.md",
    "benchmarks/results/README.md",
    *(f"docs/{page}.md" for page in _OF_ARGUMENTS),
)
_OF_GPT = partial(convergence, task="gpt")

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
    "registers": ("registers", versions.REGISTERS),
    "versions": ("versions", versions.FEATURES),
    "convergence-gpt": ("convergence", _OF_GPT),
    "convergence-gpt-long": ("convergence_long", _OF_GPT),
    "convergence-digits": ("convergence", partial(convergence, task="digits")),
    "convergence-local": ("convergence_local", _OF_GPT),
    "convergence-local-long": ("convergence_local_long", _OF_GPT),
    "convergence-local-long-tuned": ("convergence_local_long_tuned", _OF_GPT),
    "convergence-local-tuned": ("convergence_local_tuned", _OF_GPT),
    "convergence-local-overlap": ("convergence_local_overlap", _OF_GPT),
    "convergence-fsdp": ("convergence_fsdp", _OF_GPT),
    "checkpoint": ("checkpoint", checkpoint.checkpoint),
    "crash-campaign": ("crash_campaign", checkpoint.CRASH_CAMPAIGN),
    "restart-campaign": ("faults_restart", restart.CAMPAIGN),
    "restart-loop": ("faults_restart_loop", restart.LOOP_CAMPAIGN),
    "restart-resume": ("restart_resume", restart.RESUME),
    "restart-forks": ("restart_in_process", restart.RESTART),
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
    "local-throughput": ("local_throughput", LOCAL_STEPS),
    "convergence-delay": ("convergence_delay", _OF_GPT),
    "delay": ("delay", TIME_TO_ACCURACY),
    "local-steps": ("local_steps", TIME_TO_ACCURACY),
    "local-steps-100": ("local_steps_100", TIME_TO_ACCURACY),
    "time-to-accuracy": ("time_to_accuracy", TIME_TO_ACCURACY),
}
"""The name in a document -> the result or results it needs, and the function that renders them."""


_SAVING = "-snapshot -max_in_flight -on_busy -writer -verify -on_error -host_memory_limit -lock"
ARGUMENTS = {
    "comm-profiler": ("lightning_dist:CommProfiler -html -trace -csv -print_summary",),
    "elastic-restart": (f"lightning_dist:ElasticRestart {_SAVING}",),
    "elastic-loop": (
        "lightning_dist:ElasticLoop loader state gradient_accumulation_steps device signals",
    ),
    "checkpoint": ("lightning_dist:AsyncCheckpoint",),
    "state-checkpointer": (
        "lightning_dist.accelerate:AsyncStateCheckpointer snapshot staging_dir",
    ),
    "sharded": (
        "lightning_dist.frameworks.lightning.model_parallel:SyncModelParallelStrategy "
        "replicate_size data_parallel_size tensor_parallel_size",
        "lightning_dist:compress_fsdp parameters",
    ),
    "hierarchical": (
        "lightning_dist:CompressedDDPStrategy hierarchical ranks_per_node rank_groups",
    ),
    "local-steps": (
        "lightning_dist:local_updates -model -optimizer -method -error_feedback -hierarchical "
        "-ranks_per_node -rank_groups -min_compress_numel -exchange_timeout -groups",
        "lightning_dist:LocalUpdateStrategy replicas evaluate",
    ),
}
"""The name in a document -> the functions and classes whose arguments are listed, each once; all,
those that are named after it, or all but those named with a minus, which are elsewhere."""

_SECTION = re.compile(
    r"(?P<start><!-- (?P<kind>measured|arguments):(?P<name>[\w-]+) -->\n).*?"
    r"(?P<end><!-- /(?P=kind):(?P=name) -->)",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- /?(measured|arguments):")
_ENTRY = re.compile(r"^ {4}(\*{0,2}\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


def render(text: str, results: Mapping[str, Result]) -> str:
    """The document with fresh tables.

    results: the content of the JSON files by name without `.json`.
    """

    def fresh(match: re.Match[str]) -> str:
        if match["kind"] == "arguments":
            return f"{match['start']}{arguments_table(match['name'])}\n{match['end']}"
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


def arguments_table(name: str) -> str:
    """The table of a document: argument, type, default, meaning.

    Raises:
        ValueError: an argument is not in the docstring.
    """
    rows: dict[str, str] = {}
    for entry in ARGUMENTS[name]:
        path, *named = entry.split()
        left_out = {name.removeprefix("-") for name in named if name.startswith("-")}
        chosen = [name for name in named if not name.startswith("-")]
        module, _, of_module = path.partition(":")
        owner = getattr(import_module(module), of_module)
        call = owner.__init__ if isinstance(owner, type) else owner
        meanings = _described(owner) or _described(call)
        for argument in inspect.signature(call).parameters.values():
            if argument.name == "self" or argument.kind is argument.VAR_POSITIONAL:
                continue
            if argument.name in left_out or (chosen and argument.name not in chosen):
                continue
            shown = f"{'**' * (argument.kind is argument.VAR_KEYWORD)}{argument.name}"
            if shown not in meanings and "**kwargs" in meanings:  # of the class that takes them
                continue
            if shown not in meanings:
                raise ValueError(f"{path}: no line for {shown} under Args; write one")
            cells = f"`{shown}`", _type(argument, call), _default(argument), meanings[shown]
            rows.setdefault(shown, " | ".join(each.replace("|", r"\|") for each in cells))
    head = "| argument | type | default | meaning |\n| --- | --- | --- | --- |"
    return "\n".join([head, *(f"| {row} |" for row in rows.values())])


def _described(owner: Callable[..., Any]) -> dict[str, str]:
    _, _, after = (inspect.getdoc(owner) or "").partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", after)[0]
    return {name: _markdown(text) for name, text in _ENTRY.findall(section)}


def _markdown(text: str) -> str:
    return _ROLE.sub(r"`\1`", " ".join(text.split()).replace("``", "`"))


def _type(argument: inspect.Parameter, call: Callable[..., Any]) -> str:
    if argument.kind is argument.VAR_KEYWORD:
        return ""
    kind = argument.annotation
    if isinstance(kind, str):
        try:
            kind = eval(kind, inspect.unwrap(call).__globals__)
        except NameError:  # imported for annotations only
            return str(kind).replace(" | ", " or ")
    return _spelled(kind, without_none=argument.default is None)


def _spelled(kind: Any, *, without_none: bool = False) -> str:
    """A type for people; ``without_none``: where the default says that None is one."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        kinds = [each for each in get_args(kind) if not (without_none and each is NoneType)]
        return " or ".join(map(_spelled, kinds))
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(kind))
    if kind is NoneType:
        return "None"
    return "any" if kind is Any else getattr(origin or kind, "__name__", str(kind))


def _default(argument: inspect.Parameter) -> str:
    value = argument.default
    if value is argument.empty:
        return "" if argument.kind is argument.VAR_KEYWORD else "required"
    text = json.dumps(value) if isinstance(value, str) else repr(value)
    return "`" + re.sub(r"<\w+\.(\w+): [^>]*>", r"\1", text) + "`"  # of an enumeration its name


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
