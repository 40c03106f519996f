"""Records as lines of JSON, one each.

Readers skip kinds and fields that they do not know, so that old and new folders keep loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from operator import attrgetter
from types import NoneType
from typing import Any

from lightning_dist.profiling.capture.records import (
    BucketTimes,
    BurstRecord,
    ClockRecord,
    EndRecord,
    ErrorRecord,
    LinkRecord,
    Phase,
    RankRecord,
    Record,
    Span,
    StepRecord,
)

_KINDS: Mapping[str, type[Record]] = {
    each.kind: each
    for each in (
        RankRecord,
        ClockRecord,
        StepRecord,
        ErrorRecord,
        LinkRecord,
        BurstRecord,
        EndRecord,
    )
}
_ROWS: Mapping[str, type[Phase | BucketTimes | Span]] = {
    "phases": Phase,
    "buckets": BucketTimes,
    "spans": Span,
}
"""Fields of a step that hold many of a kind: rows of values in the order of their fields."""

_NAMES: Mapping[type[Any], tuple[str, ...]] = {
    each: tuple(of.name for of in fields(each)) for each in (*_KINDS.values(), *_ROWS.values())
}
_ANNOTATIONS: Mapping[str, Mapping[str, str]] = {
    each.__name__: {of.name: str(of.type) for of in fields(each)} for each in _NAMES
}
_REQUIRED: Mapping[str, frozenset[str]] = {
    each.__name__: frozenset(
        of.name for of in fields(each) if of.default is MISSING and of.default_factory is MISSING
    )
    for each in _NAMES
}
_CELLS = {name: attrgetter(*_NAMES[kind]) for name, kind in _ROWS.items()}
"""What makes a row: ``asdict`` copies everything deeply and takes ten times longer."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))

_OF_JSON: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "int | None": (int, NoneType),
    "float | None": (int, float, NoneType),
}
"""What a field may be in a line, by its annotation; the others are rows, and objects."""


def to_line(record: Record) -> str:
    """One line of JSON, without its end."""
    content = {name: getattr(record, name) for name in _NAMES[type(record)]}
    for name in _CELLS.keys() & content.keys():
        content[name] = list(map(_CELLS[name], content[name]))
    return _ENCODER.encode({"kind": record.kind, **content})


def from_line(line: str, *, rows: bool = True) -> Record | None:
    """What :func:`to_line` made a line of; None for a kind of a later version.

    Args:
        rows: False: phases, buckets and spans are checked, and left out.

    Raises:
        ValueError: it is not such a line.
    """
    try:
        content = json.loads(line)
    except RecursionError:
        raise ValueError(f"not a record, it has too many brackets: {line[:80]!r}") from None
    if not isinstance(content, dict) or not isinstance(content.get("kind"), str):
        raise ValueError(f"not a record of a communication profile: {line[:80]!r}")
    kind = _KINDS.get(content["kind"])
    if kind is None:
        return None
    values = {name: content[name] for name in _NAMES[kind] if name in content}
    try:
        for name in _ROWS.keys() & values.keys():
            found = [_row(_ROWS[name], row) for row in values[name]]
            values[name] = tuple(_ROWS[name](*row) for row in found) if rows else ()
        _require_types(kind.__name__, tuple(values), tuple(map(type, values.values())))
        if kind is RankRecord:
            _require_objects(values)
        return kind(**values)
    except TypeError as error:  # a field is missing, or of another type
        raise ValueError(f"not a whole {kind.kind} record: {error}") from None


def _row(kind: type[Any], values: Any) -> list[Any]:
    """What ``kind`` can be made of."""
    if not isinstance(values, list):
        raise TypeError(f"a row is a list, and this is {values!r:.80}")
    names = _NAMES[kind]
    row: list[Any] = values[: len(names)]
    _require_types(kind.__name__, names[: len(row)], tuple(map(type, row)))
    return row


@lru_cache(maxsize=1024)  # of thousands of lines all have the same few
def _require_types(kind: str, names: tuple[str, ...], types: tuple[type, ...]) -> None:
    """What is made of them comes later, far from here."""
    annotations = _ANNOTATIONS[kind]
    if missing := _REQUIRED[kind] - set(names):
        raise TypeError(f"without {', '.join(sorted(missing))}")
    for name, found in zip(names, types, strict=True):
        wanted = _OF_JSON.get(annotations[name])
        if wanted is not None and not issubclass(found, wanted):
            raise TypeError(f"{name} is {annotations[name]}, and this is {found.__name__}")


def _require_objects(values: Mapping[str, Any]) -> None:
    for name in ("groups", "versions"):
        if not isinstance(values.get(name, {}), dict):
            raise TypeError(f"{name} is an object, and this is {values[name]!r:.80}")
    for ranks in values.get("groups", {}).values():
        if not isinstance(ranks, list) or not all(isinstance(each, int) for each in ranks):
            raise TypeError(f"a group is a list of ranks, and this is {ranks!r:.80}")
