"""Codecs from text: ``"int8"``, ``"topk:ratio=0.01"``, ``"powersgd:rank=4,two_phase=true"``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from functools import cache
from typing import Any, get_type_hints

from lightning_dist.codecs.base import Codec

_TRUTH = {"true": True, "false": False}
_types = cache(get_type_hints)  # it compiles every annotation


def parse_codec(text: object, table: Mapping[str, type[Codec]]) -> Codec:
    """``name`` or ``name:option=value,option=value``.

    Raises:
        ValueError: unknown name or option, or a value of the wrong kind or out of range.
    """
    name, colon, options = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name not in table:
        if isinstance(text, type) and issubclass(text, Codec):
            raise ValueError(f"codec must be an object, got the class: write {text.__name__}(...)")
        meant = " or ".join(repr(near + colon + options) for near in _nearest(name, table))
        other = ", or an object such as lightning_dist.Int8(block_size=128)"
        raise ValueError(
            f"codec must be one of {', '.join(map(repr, table))}, with options as in "
            f"'int8:block_size=128'{'' if isinstance(text, str) else other}, got {text!r}"
            f"{meant and f'; did you mean {meant}?'}"
        )
    kind = table[name]
    known = {field.name: field for field in fields(kind)}
    values = {}
    for option in filter(None, options.split(",")):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in known:
            listed = ", ".join(f"{f.name}={f.default}" for f in known.values()) or "no options"
            near = _nearest(key, known) if equals else []
            form = f"write '{name}:option=value,...'" if key in known or not equals else "remove it"
            remedy = f"did you mean {near[0]!r}?" if near else form
            raise ValueError(
                f"codec {name!r} takes {listed}; got {option.strip()!r} in {text!r}; {remedy}"
            )
        values[key] = _value(value, known[key], kind, text)
    return kind(**values)


def _nearest(name: str, table: Iterable[str]) -> list[str]:
    """Names that are most like ``name``, equally so; none where no name is much like it."""
    lower = name.lower()

    def likeness(known: str) -> float:
        return difflib.SequenceMatcher(None, lower, known).ratio()

    near = difflib.get_close_matches(lower, table)
    return [each for each in near if likeness(each) == likeness(near[0])]


def _value(value: str, field: Field[Any], kind: type[Codec], text: object) -> Any:
    wanted = _types(kind)[field.name]
    try:
        if wanted is bool:
            return _TRUTH[value.lower()]
        return wanted(value)
    except (KeyError, ValueError):
        kinds = {bool: "true or false", int: "a whole number", float: "a number"}
        listed = kinds.get(wanted, "text")
        raise ValueError(
            f"Option {field.name} of codec {kind.name!r} must be {listed}, got {value!r} in "
            f"{text!r}"
        ) from None
