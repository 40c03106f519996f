"""``lightning-dist config``: Accelerate's configuration, and ours beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_dist.base.console import print_lines, print_table
from lightning_dist.cli import config_accelerate
from lightning_dist.cli.codecs import codec_names
from lightning_dist.cli.command import Json, print_json, reported
from lightning_dist.settings import CONFIG, OPTIONS, Resolved, read, resolve, write
from lightning_dist.settings.declared import settings_of
from lightning_dist.settings.exchange import ExchangeSettings, ShardedSettings, is_by_level
from lightning_dist.settings.local_updates import METHODS, LocalUpdateSettings, default_codec
from lightning_dist.settings.options import require_fit
from lightning_dist.settings.resolve import CODE, accelerate_default, check, parse, sidecar_of

_WORDS = ("true", "false", "auto", "leader", "immediate", "deferred", "null", *METHODS)
"""Values that shells complete, of the settings that take them."""


@reported
def config(
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Write defaults for this machine without questions.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            autocompletion=lambda incomplete: _completed(incomplete),
            help="Change a setting, ask nothing; accelerate.KEY for Accelerate's; repeatable.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--config_file",
            "--config-file",
            metavar="FILE",
            help="Accelerate's file; lightning_dist.yaml is beside it. Default: Accelerate's.",
        ),
    ] = None,
    shown: Annotated[
        bool, typer.Option("--show", help="Print effective settings and their origins.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create the configuration files of Accelerate and lightning_dist.

    Accelerate's file is the one that `accelerate config` writes. `lightning-dist launch` uses both;
    under `accelerate launch` the training reads lightning_dist.yaml itself.

    \b
    With questions, on a terminal:
      lightning-dist config
    Without one:
      lightning-dist config --defaults --set codec=int4
      lightning-dist config --config_file two.yaml \\
        --set accelerate.num_processes=2
    Effective settings:
      lightning-dist config --show
    """
    path = accelerate_default(os.environ) if file is None else file.expanduser()
    if shown:
        if defaults or changes:
            raise ValueError("--show writes nothing: leave out --defaults and --set")
        _show(resolve(environ=_as_launched(file)), config=path, as_json=as_json)
        return
    ours, others = _split(changes or [])
    config_accelerate.require_accelerate()
    sidecar = sidecar_of(path)
    if defaults or changes:
        written = _write(path, ours, others, anew=defaults)
    else:
        if not sys.stdin.isatty():
            raise ValueError(
                "Questions need a terminal: add --defaults, or --set KEY=VALUE for each of them"
            )
        known = read(sidecar) if sidecar.is_file() else {}
        answers = config_accelerate.ask()
        shards = config_accelerate.fsdp_version(answers) == 2
        options = _ask(known, shards=shards)
        require_possible(options, shards=shards)
        config_accelerate.save(answers, path)
        write(sidecar, options)
        written = [path, sidecar]
    if as_json:
        files = [str(path.absolute()) for path in written]
        print_json(written=files, options=read(sidecar))
        return
    for written_path in written:
        typer.echo(f"written: {written_path}")


def _completed(incomplete: str) -> list[str]:
    """Completions of ``KEY=VALUE``: keys, codecs with their options, and words as other values."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{option}=" for option in OPTIONS if option.startswith(key)]
    if key == "codec":
        return [f"codec={name}" for name in codec_names(value)]
    option = OPTIONS.get(key)
    words = [
        word for word in _WORDS if option is not None and option.outside_rule.fits(parse(word))
    ]
    return [f"{key}={word}" for word in words if word.startswith(value)]


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
        name = key.removeprefix("accelerate.")
        into = ours if name == key else others
        if name in into:
            raise ValueError(f"--set {key} is given twice; keep one")
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
        config = config_accelerate.defaults() if fresh else config_accelerate.load(path)
        for note in config_accelerate.change(config, others):
            typer.echo(f"lightning-dist: {note}", err=True)
    if anew:
        declared = settings_of(ExchangeSettings)
        options = {name: setting.default for name, setting in declared.items()}
    else:
        options = read(sidecar) if sidecar.is_file() else {}
    if ours.get("method") and "codec" not in ours:
        options["codec"] = default_codec(ours["method"])
    options.update(ours)
    training = config_accelerate.load(path) if config is None else config
    require_possible(options, shards=config_accelerate.fsdp_version(training) == 2)
    if config is not None:
        config_accelerate.save(config, path)
        written.append(path)
    if anew or ours or not sidecar.is_file():
        write(sidecar, options)
        written.append(sidecar)
    return written


def _ask(known: Mapping[str, Any], *, shards: bool) -> dict[str, Any]:
    """Answers to our questions about what takes effect, and what the file had of the same."""
    options: dict[str, Any] = {}
    if not shards and (method := _answer("method", known)):
        options["method"] = method
        if method != known.get("method"):
            known = {**known, "codec": default_codec(method)}
    family = ShardedSettings if shards else LocalUpdateSettings if options else ExchangeSettings
    names = settings_of(family)
    kept = {name: value for name, value in known.items() if name in names}
    asked = [name for name, declared in names.items() if declared.ask and name not in options]
    return {**kept, **options, **{name: _answer(name, kept) for name in asked}}


def _answer(name: str, known: Mapping[str, Any]) -> Any:
    """The answer to one of our questions; a wrong one is asked again."""
    offered = known.get(name, OPTIONS[name].outside_default)
    while True:
        text = str(typer.prompt(OPTIONS[name].ask, default=_text(offered)))
        try:
            value = parse(text)
            require_fit(OPTIONS[name], value, where="your answer")
            if name in ("codec", "parameters") and value is not None:
                _require_codec(value)
        except ValueError as error:
            typer.echo(f"  {error}")
            continue
        return value


def _require_codec(value: Any) -> None:
    from lightning_dist.codecs import resolve_codec  # torch

    for codec in value.values() if is_by_level(value) else [value]:
        resolve_codec(codec)


def require_possible(options: Mapping[str, Any], *, shards: bool = False) -> None:
    """Refuse now what training would refuse: settings that exclude each other.

    Args:
        shards: the training is one of FSDP2.

    Raises:
        ValueError: with the rule, the value and what to do.
    """
    if "codec" in options:
        _require_codec(options["codec"])
    family: type[ExchangeSettings] = ExchangeSettings
    if shards or options.get("parameters") is not None:
        family = ShardedSettings
    elif options.get("method") is not None:
        family = LocalUpdateSettings
    given = {
        name: value
        for name, value in options.items()
        if value is not None or not OPTIONS[name].by_method
    }
    Resolved(given, dict.fromkeys(given, CODE), ()).make(family)


def _show(resolved: Resolved, *, config: Path, as_json: bool) -> None:
    """Print every option with its value and where that comes from."""
    rows = {
        name: {"value": resolved.value(name), "from": resolved.origins.get(name, "default")}
        for name in OPTIONS
    }
    there = str(config) if config.is_file() else None
    if as_json:
        print_json(options=rows, files=resolved.files, accelerate=there)
        return
    cells = [(name, _text(row["value"]), row["from"]) for name, row in rows.items()]
    print_table(("option", "value", "from"), cells, fold=("value", "from"))
    accelerate = there or f"{config} does not exist; lightning-dist config creates it"
    print_lines(f"accelerate: {accelerate}")


def _text(value: Any) -> str:
    """A setting as users write it."""
    return value if isinstance(value, str) else json.dumps(value)
