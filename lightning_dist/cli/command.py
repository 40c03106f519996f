"""Common parts of commands: the option ``--json``, and errors as one line and an exit code."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from lightning_dist.base.optional import needed_by
from lightning_dist.checkpoint.disk.format import CheckpointError, CorruptCheckpointError

DAMAGED = 1
BAD_INPUT = 2

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

P = ParamSpec("P")
T = TypeVar("T")


def reported(command: Callable[P, T]) -> Callable[P, T]:
    """``command``, which ends with one line on stderr where it would end with a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with needed_by(f"lightning-dist {command.__name__.replace('_', ' ')}"):
                return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:  # those of object stores are of any class
            typer.echo(f"lightning-dist: {line_of(error)}", err=True)
            code = DAMAGED if isinstance(error, CorruptCheckpointError) else BAD_INPUT
            raise typer.Exit(code) from None

    return run


def print_json(**content: Any) -> None:
    """Print one object of JSON."""
    typer.echo(json.dumps(content, indent=2))


def line_of(error: Exception) -> str:
    """Message of ``error``, on one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, CheckpointError | OSError | ValueError | ImportError) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())
