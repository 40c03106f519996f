"""Accelerate's own side of ``lightning-dist config``: its questions, its defaults, its file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_type_hints

from lightning_dist.settings.options import unknown
from lightning_dist.settings.resolve import put


def require_accelerate() -> None:
    """Raise ImportError, with what to install, where Accelerate is not."""
    try:
        import accelerate  # noqa: F401
    except ImportError:
        missing = "it needs accelerate: pip install 'lightning-dist[accelerate]'"
        raise ImportError(missing) from None


def ask() -> Any:
    """Accelerate's questions, on this terminal. Its configuration."""
    from lightning_dist.frameworks.accelerate.private import ask_for_configuration

    return ask_for_configuration()


def defaults() -> Any:
    """The configuration that ``accelerate config default`` would write on this machine."""
    from lightning_dist.frameworks.accelerate import private

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        written = private.write_default_configuration(f"{folder}/c.yaml")
        return private.read_configuration(str(written))


def load(path: Path) -> Any:
    """Accelerate's configuration in a file.

    Raises:
        ValueError: Accelerate does not take it.
        FileNotFoundError: it is not there.
    """
    from lightning_dist.frameworks.accelerate.private import read_configuration

    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}; lightning-dist config writes one")
    try:
        return read_configuration(str(path))
    except ImportError:  # of Accelerate itself
        raise
    except Exception as error:  # of any class: its reader takes the content as it comes
        raise ValueError(f"accelerate cannot read {path}: {error}") from error


def change(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Set fields of Accelerate's configuration. Returns what follows from that, in a line each.

    Raises:
        ValueError: an unknown field, or a value that it does not take.
    """
    kinds = get_type_hints(type(config))
    for name, value in values.items():
        where = "--set accelerate.*"
        if name not in kinds:
            raise ValueError(unknown(name, tuple(kinds), where=where))
        setattr(config, name, _fitting(name, value, kinds[name]))
    type(config).__post_init__(config)
    notes = []
    several = (getattr(config, "num_processes", 1) or 1) > 1
    if several and text_of(config.distributed_type) == "NO" and "distributed_type" not in values:
        config.distributed_type = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
        type(config).__post_init__(config)
        notes.append(
            f"accelerate.distributed_type={text_of(config.distributed_type)} (with NO, "
            f"num_processes={config.num_processes} would start one process)"
        )
    return notes


def fsdp_version(config: Any) -> int:
    """1 or 2; 0 where the configuration is not of FSDP."""
    is_fsdp = text_of(config.distributed_type) == "FSDP"
    return int((config.fsdp_config or {}).get("fsdp_version", 1)) if is_fsdp else 0


def save(config: Any, path: Path) -> None:
    """Write it as Accelerate does, in one go."""
    import yaml

    content = config.to_dict()
    as_json = path.suffix == ".json"
    text = json.dumps(content, indent=2, sort_keys=True) if as_json else yaml.safe_dump(content)
    put(path, text.rstrip("\n") + "\n")


def _fitting(name: str, value: Any, kind: Any) -> Any:
    kinds = get_args(kind) or (kind,)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if name == "mixed_precision":
        from accelerate.utils import PrecisionType

        enums = [PrecisionType]
        value = "no" if value is False else value  # which YAML makes of no
    if enums:
        listed = [str(member.value) for enum in enums for member in enum]
        if str(value) in listed:
            return str(value)
        raise ValueError(f"accelerate.{name} must be one of {', '.join(listed)}, got {value!r}")
    origins = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
    if not isinstance(value, origins) or (isinstance(value, bool) and bool not in origins):
        names = " or ".join("null" if cls is type(None) else cls.__name__ for cls in origins)
        raise ValueError(f"accelerate.{name} must be {names}, got {value!r}")
    return value


def text_of(kind: Any) -> str:
    """An enumeration of Accelerate's as its files have it."""
    return "NO" if kind is False else str(getattr(kind, "value", kind))  # YAML's NO is a boolean
