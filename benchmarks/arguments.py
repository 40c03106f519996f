"""Tables of the arguments of public names, from signatures and docstrings: see ``docs_tables``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

TABLES = {
    "comm-profiler": ("lightning_dist:CommProfiler -html -trace -csv -print_summary",),
    "elastic-restart": ("lightning_dist:ElasticRestart",),
    "elastic-loop": (
        "lightning_dist:ElasticLoop -dirpath -every_n_train_steps -every_n_epochs -max_to_keep"
        " -batch_policy -seed -weights_only -preemption_check -preemption_poll_interval"
        " -grace_period -hang_timeout -format -recovery -mirror_residuals",
    ),
    "checkpoint": ("lightning_dist:AsyncCheckpoint",),
    "state-checkpointer": (
        "lightning_dist.accelerate:AsyncStateCheckpointer snapshot staging_dir",
    ),
    "sharded": (
        "lightning_dist:CompressedModelParallelStrategy "
        "replicate_size data_parallel_size tensor_parallel_size parameters",
    ),
    "hierarchical": (
        "lightning_dist:CompressedDDPStrategy hierarchical ranks_per_host rank_groups",
    ),
    "local-steps": (
        "lightning_dist:local_updates -model -optimizer -method -error_feedback -hierarchical"
        " -ranks_per_host -rank_groups -min_compress_numel -exchange_timeout -groups",
        "lightning_dist.integrations.strategies.local_updates:LocalUpdateArguments replicas",
        "lightning_dist:LocalUpdateStrategy evaluate",
    ),
}
"""The name in a document -> the functions and classes whose arguments are listed, each once; all,
those that are named after it, or all but those named with a minus, which are elsewhere."""

_ENTRY = re.compile(r"^ {4}(\*{0,2}\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


def table(name: str) -> str:
    """The table of a document: argument, type, default, meaning.

    Raises:
        ValueError: an argument is not in the docstring.
    """
    rows: dict[str, str] = {}
    for entry in TABLES[name]:
        path, *named = entry.split()
        left_out = {name.removeprefix("-") for name in named if name.startswith("-")}
        chosen = [name for name in named if not name.startswith("-")]
        module, _, of_module = path.partition(":")
        owner = getattr(import_module(module), of_module)
        call = owner.__init__ if isinstance(owner, type) else owner
        meanings = _described(owner) or _described(call)
        for argument in list(inspect.signature(call).parameters.values()):
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
