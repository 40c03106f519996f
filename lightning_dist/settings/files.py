"""Settings in YAML files, and where these are looked for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.settings.options import require_fit, require_known

SIDECAR = "lightning_dist.yaml"
PREFIX = "LIGHTNING_DIST_"
CONFIG = f"{PREFIX}CONFIG"
_OF_RECOVERY = ("RECOVERY_STORE", "WORKER", "MIN_WORKERS", "BEAT_TIMEOUT", "REPORT_TIMEOUT")
OTHERS = tuple(f"{PREFIX}{name}" for name in ("HOSTNAME", *_OF_RECOVERY))
"""Variables with our prefix that are no settings of what travels."""
_HEAD = "# Settings of lightning_dist for Accelerate; `lightning-dist config` writes this file.\n"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is there twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, (key, (spelled, _)) in enumerate(zip(keys, node.value, strict=True)):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice; keep one", spelled.start_mark
                )
        content: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return content


def read(path: Path) -> dict[str, Any]:
    """The settings in a file; none if it is empty.

    Raises:
        ValueError: no YAML (the line is named), no mapping, an unknown key, or a wrong value.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = yaml.load(file, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML (key: value): {problem}") from None
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
    """Raise ValueError for unknown settings and values of the wrong type."""
    for name, value in options.items():
        require_fit(require_known(name, where=where), value, where=where)


def parse(text: str) -> Any:
    """The value of ``text`` on a command line or in a variable, as YAML; raises ValueError."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):  # ValueError: a date that does not exist
        raise ValueError(f"{text!r} is not a valid YAML value; quote it") from None


def write(path: Path, options: Mapping[str, Any]) -> None:
    """Write settings so that :func:`read` gives the same; what was there is replaced at once."""
    check(options, where=f"what is written to {path}")
    put(path, _HEAD + yaml.safe_dump(dict(options), sort_keys=False))


def put(path: Path, text: str) -> None:
    """Replace a file in one go, so that nobody reads half of it; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


def accelerate_folder(environ: Mapping[str, str]) -> Path:
    """The folder of Accelerate's ``default_config.yaml``; its rule, without importing it."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    return home / "accelerate"


def accelerate_default(environ: Mapping[str, str]) -> Path:
    """The file that ``accelerate launch`` reads when none is named."""
    return accelerate_folder(environ) / "default_config.yaml"


def sidecar_of(config: Path) -> Path:
    """Our file beside a file of Accelerate's."""
    return config.with_name(SIDECAR)
