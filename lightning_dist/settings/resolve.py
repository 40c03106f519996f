"""Settings from outside of the code: variables and files, in their order."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.settings.exchange import ExchangeSettings, is_by_level
from lightning_dist.settings.options import (
    OBJECTS,
    OPTIONS,
    require_fit,
    require_known,
    require_only,
    unknown,
)

SIDECAR = "lightning_dist.yaml"
PREFIX = "LIGHTNING_DIST_"
CONFIG = f"{PREFIX}CONFIG"
_OF_RECOVERY = ("RECOVERY_STORE", "WORKER", "MIN_WORKERS", "BEAT_TIMEOUT", "REPORT_TIMEOUT")
OTHERS = tuple(f"{PREFIX}{name}" for name in ("HOSTNAME", "PRELOAD", *_OF_RECOVERY))
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


CODE = "the code"


@dataclass(frozen=True)
class Resolved:
    """Settings that were given, by option; options that nobody set are not there."""

    options: dict[str, Any]
    """Arguments of a family of settings."""
    origins: dict[str, str]
    """Origin of each option: ``"the code"``, the name of a variable, or the path of a file."""
    files: tuple[str, ...]
    """Files that were read, the one that wins first."""

    def value(self, name: str) -> Any:
        """Value in force of an option: what was set, or the default."""
        return self.options.get(name, OPTIONS[name].outside_default)

    @property
    def outside(self) -> dict[str, str]:
        """The origins of the options that the code does not set."""
        return {key: origin for key, origin in self.origins.items() if origin != CODE}

    def outside_text(self) -> str:
        """Differences from the defaults because of variables and files, and because of which."""
        by_origin: dict[str, list[str]] = {}
        for key, origin in self.outside.items():
            if self.options[key] != OPTIONS[key].outside_default:
                by_origin.setdefault(origin, []).append(f"{key}={self.options[key]!r}")
        return ", ".join(f"{' '.join(listed)} ({origin})" for origin, listed in by_origin.items())

    def make(self, family: type[ExchangeSettings], call: Callable[..., Any] | None = None) -> Any:
        """The settings of a family; ``call``: its constructor, where it is a base of another.

        Raises:
            ValueError: a setting that is of another family, out of range or cannot take effect,
                with where those from outside of the code come from.
        """
        with self.named_in_errors():
            options = require_only(self.options, family)
            given = {
                name: value
                for name, value in options.items()
                if value is not None or self.origins[name] == CODE
            }
            return (call or family)(**given)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Add to a ValueError of the body where the settings come from."""
        try:
            yield
        except ValueError as error:
            if not self.outside:
                raise
            named = ", ".join(f"{key} from {origin}" for key, origin in self.outside.items())
            raise ValueError(f"{error} (set outside of the code: {named})") from error


def resolve(
    given: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] = os.environ
) -> Resolved:
    """Merge what the code gives with what is set outside of it.

    The code wins over variables ``LIGHTNING_DIST_<OPTION>``, those over the file that
    ``LIGHTNING_DIST_CONFIG`` names, and that over ``lightning_dist.yaml`` beside Accelerate's
    default configuration; option by option.

    Args:
        given: settings that the code sets.
        environ: the variables.

    Raises:
        ValueError: an unknown setting, a value of the wrong type, a file that is no mapping, or
            settings from two places that contradict each other.
    """
    options: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value in (given or {}).items():
        if name not in OBJECTS:
            require_known(name, where=CODE)
        options[name], origins[name] = value, CODE
    for variable, name, value in _variables(environ):
        if name not in options:
            options[name], origins[name] = value, variable
    files = _files(environ)
    for path in files:
        for name, value in read(path).items():
            if name not in options:
                options[name], origins[name] = value, str(path)
    _refuse_contradictions(options, origins)
    ordered = [name for name in OPTIONS if name in options]
    ordered += [name for name in options if name not in OPTIONS]
    return Resolved(
        {name: options[name] for name in ordered},
        {name: origins[name] for name in ordered},
        tuple(map(str, files)),
    )


class FromOutside:
    """Mixin before a family of settings: what is left out comes from variables and files."""

    resolved: Resolved
    """Which settings are from where."""

    def __init__(self, resolved: Resolved) -> None:
        object.__setattr__(self, "resolved", resolved)
        resolved.make(type(self), super().__init__)  # type: ignore[arg-type]


def from_outside(**given: Any) -> Resolved:
    """:func:`resolve` for the process that runs."""
    return resolve(given)


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    known = {f"{PREFIX}{name.upper()}": option for name, option in OPTIONS.items()}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in (CONFIG, *OTHERS):
            continue
        if variable not in known:
            names = (*known, CONFIG, *OTHERS)
            raise ValueError(unknown(variable, names, where="the environment", prefix=PREFIX))
        if not text.strip():
            continue  # as good as not set, which scripts do to switch a variable off
        try:
            value = parse(text)
        except ValueError as error:
            raise ValueError(f"{variable}: {error}") from None
        require_fit(known[variable], value, where=variable)
        yield variable, known[variable].name, value


def _files(environ: Mapping[str, str]) -> list[Path]:
    files = []
    if named := environ.get(CONFIG, "").strip():
        path = Path(named).expanduser().absolute()
        if not path.is_file():
            raise ValueError(f"{CONFIG} names {named}, and there is no such file; unset it")
        files.append(path)
    sidecar = sidecar_of(accelerate_default(environ)).absolute()
    if sidecar.is_file() and not any(path.samefile(sidecar) for path in files):
        files.append(sidecar)
    return files


def _refuse_contradictions(options: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Which of two sources wins is settled by option; these options are about the same."""
    flat = options.get("hierarchical") is False
    levels = is_by_level(options.get("codec"))
    has_count = options.get("ranks_per_node") is not None
    has_groups = options.get("rank_groups") is not None
    for wrong, names, why in (
        (flat and has_count, ("hierarchical", "ranks_per_node"), "a flat exchange has no groups"),
        (flat and has_groups, ("hierarchical", "rank_groups"), "a flat exchange has no groups"),
        (flat and levels, ("hierarchical", "codec"), "a flat exchange has one codec"),
        (
            has_count and has_groups,
            ("ranks_per_node", "rank_groups"),
            "both define which ranks share a node",
        ),
    ):
        first, second = names
        # Both from one place: who set them sees both, and the settings themselves are checked.
        if wrong and origins[first] != origins[second]:
            named = " and ".join(f"{name}={options[name]!r} ({origins[name]})" for name in names)
            raise ValueError(
                f"{named} contradict each other: {why}; remove one, or set both in one place"
            )
