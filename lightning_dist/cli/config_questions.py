"""Our questions of ``lightning-dist config``, after Accelerate's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from lightning_dist.configuration.files import parse
from lightning_dist.configuration.options import OPTIONS, require_fit

_QUESTIONS = {
    "codec": "The codec of gradients, with options; `lightning-dist codecs` lists them",
    "error_feedback": "Keep what the codec loses and send it later? true, false or auto",
    "hierarchical": "Reduce inside every host first? true, false, auto or leader",
    "ranks_per_host": "Ranks of a host that follow each other; null: as the hosts' names say",
    "min_compress_numel": "Elements below which a tensor travels as it is; null: the codec's own",
    "start_step": "Steps before compression starts",
    "compile_kernels": "Compile the codec's kernels at the start? true, false or auto",
}


def ask_ours(known: Mapping[str, Any]) -> dict[str, Any]:
    """The answers, those of ``known`` offered; a wrong answer is asked again.

    Raises:
        typer.Abort: the terminal is gone, or the user has had enough.
    """
    answers = dict(known)
    for name, question in _QUESTIONS.items():
        answers[name] = _answer(name, question, known.get(name, OPTIONS[name].default))
    return answers


def _answer(name: str, question: str, offered: Any) -> Any:
    while True:
        text = str(typer.prompt(question, default=_text(offered)))
        try:
            value = parse(text)
            require_fit(OPTIONS[name], value, where="your answer")
            if name == "codec":
                require_codec(value)
        except ValueError as error:
            typer.echo(f"  {error}")
            continue
        return value


def require_codec(value: Any) -> None:
    """Refuse a codec that does not exist, or options that it does not have.

    Raises:
        ValueError: with those that there are.
    """
    from lightning_dist.codecs import resolve_codec  # torch

    for each in value.values() if isinstance(value, Mapping) else [value]:
        resolve_codec(each)


def require_possible(options: Mapping[str, Any]) -> None:
    """Refuse now what training would refuse: settings that do not go together.

    Raises:
        ValueError: with the rule, the value and what to do.
    """
    from lightning_dist.settings import Settings  # torch

    if "codec" in options:
        require_codec(options["codec"])
    Settings.check(**options)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
