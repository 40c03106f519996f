"""The words of a launch: which are options, where the script is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

USAGE = "lightning-dist launch [OPTIONS] script.py [ARGUMENTS]"
FLAGS = ("--dry-run", "--torchrun")
"""Ours; they do not reach the launcher."""


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> Any:
    """What the parser of a launcher, and ours, make of the words.

    Raises:
        ValueError: what it would have ended the program for.
    """

    def fail(message: str) -> NoReturn:
        if "training_script" in message:
            message = f"no script: {USAGE}"
        raise ValueError(message)

    parser.allow_abbrev = False  # --dry would be known here, and then reach the launcher
    parser.error = fail  # type: ignore[method-assign]
    for flag in FLAGS:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(list(words))


def require_script(given: Any) -> None:
    """Refuse a script that is not there.

    Raises:
        ValueError: with its name.
    """
    if is_missing(given):
        raise ValueError(f"there is no script {given.training_script}")


def is_missing(given: Any) -> bool:
    """Whether a script is named that is not there."""
    return not (given.module or given.no_python or Path(given.training_script).is_file())


def cut(words: Sequence[str], given: Any) -> tuple[list[str], list[str]]:
    """The options before the script without ours, and the script with what follows it."""
    script = len(words) - 1 - len(given.training_script_args)
    if words[script] != given.training_script:  # argparse drops a -- after it
        script -= 1
    options = [word for word in words[:script] if word not in (*FLAGS, "--")]
    after = words[script + 1 :] if words[script] == "--" else words[script:]
    return options, list(after)
