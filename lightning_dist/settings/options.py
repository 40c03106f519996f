"""Options that may be set from outside of the code, and the values they take."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METHODS = ("local_sgd", "post_local_sgd", "diloco", "streaming", "sparseloco")
"""Of local updates; here without torch."""
POLICIES = ("by_size", "by_name", "warmup", "after_steps")
"""Codecs that choose codecs; here without torch."""
_OF_METHOD = "(the method's default)"


@dataclass(frozen=True)
class Option:
    """One setting of ``compress_ddp``, ``compress_fsdp`` or ``local_updates``, by the same name.

    Args:
        takes: what a value must be, for messages and documents.
        fits: whether a value from a file or a variable is one; the code may give more (a codec
            object), which is checked where it is used.
    """

    name: str
    default: Any
    takes: str
    fits: Callable[[object], bool]


def _switch(*words: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, bool) or value in words


def _is_count(value: object, *, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_commit(value: object) -> bool:
    return value in ("auto", "immediate", "deferred")


def is_by_level(codec: object) -> bool:
    """Whether ``codec`` has one codec inside a node and one between nodes."""
    return isinstance(codec, Mapping) and set(codec) == {"intra", "inter"}


def _is_codec(value: object) -> bool:
    if not isinstance(value, Mapping):
        return _is_text(value)
    if is_by_level(value):
        return all(map(_is_codec, value.values()))
    return len(value) == 1 and set(value) <= set(POLICIES)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_groups(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(map(_is_count, value)) or all(map(_is_groups, value))


def _is_count_or_null(value: object) -> bool:
    return value is None or _is_count(value)


def _is_time_or_null(value: object) -> bool:
    return value is None or (type(value) in (int, float) and value > 0)  # type: ignore[operator]


def _is_rate_or_null(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "codec",
            "int8",
            "a codec such as int8 or topk:ratio=0.01, a policy such as {by_size: {codec: int4}}, "
            "or {intra: CODEC, inter: CODEC}",
            _is_codec,
        ),
        Option("error_feedback", "auto", "true, false or auto", _switch("auto")),
        Option("hierarchical", "auto", "true, false, auto or leader", _switch("auto", "leader")),
        Option(
            "ranks_per_node",
            None,
            "1 or more ranks, or null (by host name)",
            lambda value: value is None or _is_count(value, least=1),
        ),
        Option(
            "rank_groups",
            None,
            "groups of ranks such as [[0, 1], [2, 3]], or null",
            lambda value: value is None or (_is_groups(value) and not _is_count(value[0])),  # type: ignore[index]
        ),
        Option(
            "min_compress_numel",
            None,
            "0 or more elements, or null (the codec's default)",
            _is_count_or_null,
        ),
        Option("start_step", 0, "0 or more synchronised steps", _is_count),
        Option("compile_kernels", "auto", "true, false or auto", _switch("auto")),
        Option("commit", "auto", "auto, immediate or deferred", _is_commit),
        Option("delay", 0, "0 or 1", lambda value: type(value) is int and value in (0, 1)),
        Option("exchange_timeout", None, "seconds above 0, or null", _is_time_or_null),
        Option(
            "method",
            None,
            f"{', '.join(METHODS)}, or null (no local updates)",
            lambda value: value is None or value in METHODS,
        ),
        *(
            Option(name, None, f"0 or more steps, or null {_OF_METHOD}", _is_count_or_null)
            for name in ("sync_every", "overlap_steps", "ddp_steps")
        ),
        Option(
            "fragments",
            None,
            f"1 or more parts, or null {_OF_METHOD}",
            lambda value: value is None or _is_count(value, least=1),
        ),
        *(
            Option(name, None, f"a number, or null {_OF_METHOD}", _is_rate_or_null)
            for name in ("outer_lr", "outer_momentum", "mixing")
        ),
        Option(
            "weigh_by",
            None,
            "workers or samples, or null (workers)",
            lambda value: value in (None, "workers", "samples"),
        ),
        Option("offload", None, "true, false or null (false)", lambda v: v in (None, True, False)),
        Option(
            "parameters",
            None,
            "a codec such as int8, or null (FSDP gathers parameters as they are)",
            lambda value: value is None or _is_text(value),
        ),
    )
}


OF_DDP = (
    "codec",
    "error_feedback",
    "hierarchical",
    "ranks_per_node",
    "rank_groups",
    "min_compress_numel",
    "start_step",
    "compile_kernels",
    "commit",
    "delay",
    "exchange_timeout",
)
"""Options of ``compress_ddp``."""
OF_SHARDS = (
    "codec",
    "error_feedback",
    "min_compress_numel",
    "start_step",
    "compile_kernels",
    "commit",
    "parameters",
)
"""Options of ``compress_fsdp``."""
OF_LOCAL = (
    *(name for name in OPTIONS if name not in OF_DDP + OF_SHARDS),
    *OF_DDP[:6],
    "exchange_timeout",
)
"""Options of ``local_updates``."""


def require_of_shards(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``compress_fsdp`` among these; raises ValueError for others in force."""
    return require_only(options, OF_SHARDS, under="under FSDP2")


def require_only(options: Mapping[str, Any], names: Sequence[str], *, under: str) -> dict[str, Any]:
    """The options of these names; raises ValueError for others in force, ``under`` what."""
    for name, value in options.items():
        if name not in names and value != OPTIONS[name].default:
            owners = {"DDP": OF_DDP, "FSDP2": OF_SHARDS, "local updates": OF_LOCAL}
            owner = next(each for each, options in owners.items() if name in options)
            raise ValueError(
                f"{name} is a setting of {owner} and cannot take effect {under}, got {value!r}; "
                "remove it"
            )
    return {name: value for name, value in options.items() if name in names}


def require_known(name: str, *, where: str) -> Option:
    """The option of this name; raises ValueError with the one that was meant."""
    if name in OPTIONS:
        return OPTIONS[name]
    raise ValueError(unknown(name, tuple(OPTIONS), where=where))


_OTHER_WORDS = {"compression": "codec", "compressor": "codec"}
"""Names in other packages, and ours."""


def unknown(
    name: object, known: tuple[str, ...], *, where: str, prefix: str = "", listed: str = ""
) -> str:
    """The message for a name that is not there: the nearest one, otherwise all of them.

    Args:
        prefix: of all names, which makes none of them a near match.
        listed: text in the place of all names.
    """
    bare = [each.removeprefix(prefix) for each in known]
    given = str(name).removeprefix(prefix)
    words = set(given.split("_"))
    longer = [each for each in bare if words <= set(each.split("_"))]  # a word was left out
    other = _OTHER_WORDS.get(given)
    near = [other] if other in bare else difflib.get_close_matches(given, longer or bare, n=1)
    valid = f"valid names: {listed or ', '.join(known)}"
    remedy = f"did you mean {prefix + near[0]!r}?" if near else valid
    return f"Unknown setting {str(name)!r} in {where}: {remedy}"


def require_fit(option: Option, value: object, *, where: str) -> None:
    """Raise ValueError for a value of the wrong type, with the rule and where it was set."""
    if not option.fits(value):
        raise ValueError(
            f"{option.name} must be {option.takes}; got {value!r} in {where}; correct it there"
        )
