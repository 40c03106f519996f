"""Settings in YAML files."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_dist.configuration.options import require_fit, require_known

_HEAD = "# Settings of lightning_dist for Accelerate; `lightning-dist config` writes this file.\n"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is there twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is there twice; keep one", node.start_mark
                )
        content: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return content


def read(path: Path) -> dict[str, Any]:
    """The settings in a file; none if it is empty.

    Raises:
        ValueError: no YAML, no mapping, an unknown key, or a value of the wrong type.
        OSError: it cannot be read.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} is no YAML of key: value lines: {said}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must be a YAML mapping, lines of key: value such as 'codec: int8'; it is a "
            f"{type(content).__name__}"
        )
    check(content, where=str(path))
    return content


def check(options: Mapping[str, Any], *, where: str) -> None:
    """Refuse unknown settings and values of the wrong type; ``where`` is for the message.

    Raises:
        ValueError: with the remedy.
    """
    for name, value in options.items():
        require_fit(require_known(name, where=where), value, where=where)


def parse(text: str) -> Any:
    """The value of ``text`` on a command line or in a variable: as YAML reads it.

    Raises:
        ValueError: it is no YAML value.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is no YAML value; quote it") from None


def write(path: Path, options: Mapping[str, Any]) -> None:
    """Write settings so that :func:`read` gives the same; what was there is replaced at once.

    Raises:
        ValueError: an unknown key, or a value of the wrong type.
    """
    check(options, where=f"what is written to {path}")
    put(path, _HEAD + yaml.safe_dump(dict(options), sort_keys=False))


def put(path: Path, text: str) -> None:
    """Replace a file in one go, so that nobody reads half of it; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
