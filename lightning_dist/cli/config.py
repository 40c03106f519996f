"""``lightning-dist config``: Accelerate's configuration, and ours beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_dist.cli import config_accelerate as theirs
from lightning_dist.cli.config_questions import ask_ours, require_possible
from lightning_dist.cli.config_show import show
from lightning_dist.cli.errors import reported
from lightning_dist.configuration import CONFIG, OPTIONS, read, resolve, write
from lightning_dist.configuration.files import check, parse
from lightning_dist.configuration.places import accelerate_default, sidecar_of

_THEIRS = "accelerate."


@reported
def config(
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Ask nothing: write what suits this machine.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Ask nothing: change this; accelerate.KEY for Accelerate's own; repeatable.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--config_file",
            "--config-file",
            metavar="FILE",
            help="Accelerate's file, ours is lightning_dist.yaml beside it; default: Accelerate's.",
        ),
    ] = None,
    shown: Annotated[
        bool, typer.Option("--show", help="Print what is in force and where it comes from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Ask Accelerate's questions and then ours, and write both answers.

    Accelerate's file is as `accelerate config` writes it. `lightning-dist launch` uses both; under
    `accelerate launch` the training finds ours itself.

    \b
    Questions, on a terminal:
      lightning-dist config
    Without one:
      lightning-dist config --defaults --set codec=int4
      lightning-dist config --set accelerate.num_processes=2 --config_file two.yaml
    What is in force:
      lightning-dist config --show
    """
    path = accelerate_default(os.environ) if file is None else file.expanduser()
    if shown:
        if defaults or changes:
            raise ValueError("--show writes nothing: leave out --defaults and --set")
        show(resolve(environ=_as_launched(file)), config=path, as_json=as_json)
        return
    ours, others = _split(changes or [])
    theirs.require_accelerate()
    if defaults or changes:
        done = _write(path, ours, others, anew=defaults)
    else:
        if not sys.stdin.isatty():
            raise ValueError(
                "questions need a terminal: add --defaults, or --set KEY=VALUE for each of them"
            )
        done = _ask(path)
    _tell(done, sidecar_of(path), as_json=as_json)


def _as_launched(file: Path | None) -> Mapping[str, str]:
    """The variables that a training would have that was launched with this file."""
    if file is None or os.environ.get(CONFIG) or not sidecar_of(file.expanduser()).is_file():
        return os.environ
    return {**os.environ, CONFIG: str(sidecar_of(file.expanduser()).absolute())}


def _split(changes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our settings and Accelerate's, of ``KEY=VALUE``."""
    ours: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for text in changes:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ValueError(f"--set must be KEY=VALUE, such as codec=int8; got {text!r}")
        of_theirs = key.startswith(_THEIRS)
        into, name = (others, key.removeprefix(_THEIRS)) if of_theirs else (ours, key)
        if name in into:
            raise ValueError(f"--set {key} is there twice; keep one")
        into[name] = parse(value)
    check(ours, where="--set")
    return ours, others


def _write(
    path: Path, ours: Mapping[str, Any], others: Mapping[str, Any], *, anew: bool
) -> list[Path]:
    """Write what has changed; the files that were written."""
    written, sidecar = [], sidecar_of(path)
    fresh = anew or not path.is_file()
    config = None
    if fresh or others:
        config = theirs.defaults() if fresh else theirs.load(path)
        for note in theirs.change(config, others):
            typer.echo(f"lightning-dist: {note}", err=True)
    if anew:
        options = {name: option.default for name, option in OPTIONS.items()}
    else:
        options = read(sidecar) if sidecar.is_file() else {}
    options.update(ours)
    require_possible(options)
    if config is not None:
        theirs.save(config, path)
        written.append(path)
    if anew or ours or not sidecar.is_file():
        write(sidecar, options)
        written.append(sidecar)
    return written


def _ask(path: Path) -> list[Path]:
    sidecar = sidecar_of(path)
    known = read(sidecar) if sidecar.is_file() else {}
    config = theirs.ask()
    options = ask_ours(known)
    require_possible(options)
    theirs.save(config, path)
    write(sidecar, options)
    return [path, sidecar]


def _tell(written: Sequence[Path], sidecar: Path, *, as_json: bool) -> None:
    if as_json:
        files = [str(path.absolute()) for path in written]
        typer.echo(json.dumps({"written": files, "options": read(sidecar)}, indent=2))
        return
    for path in written:
        typer.echo(f"written: {path}")
