"""Codecs by name, with options in a text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.base.log import get_logger
from lightning_dist.codecs.base import Codec

log = get_logger(__name__)


GROUP = "lightning_dist.codecs"
"""Group of entry points ``NAME = package.module:Class``, with the name of the codec."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class CodecTable(Mapping[str, type[Codec]]):
    """Codec classes by name. A package is imported when one of its codecs is looked up."""

    def __init__(self, own: Iterable[type[Codec]]) -> None:
        self._types = {codec.name: codec for codec in own}
        self._own = frozenset(self._types)
        self._listeners: list[Callable[[str], None]] = []

    def __getitem__(self, name: str) -> type[Codec]:
        if name not in self._types and name in self._installed:
            _load(self._installed[name], into=self)
        return self._types[name]

    def __contains__(self, name: object) -> bool:
        return name in self._types or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._types, *self._installed]))

    def __len__(self) -> int:
        return len(self._types.keys() | self._installed.keys())

    def add(self, codec: type[Codec]) -> None:
        """Add a class, or replace an earlier one of the same module and name.

        Raises:
            ValueError: it cannot be created from text, or its name is taken.
        """
        _check(codec)
        taken = self._types.get(codec.name)
        if taken is not None and _place(taken) != _place(codec):
            raise ValueError(
                f"The name of a codec must not be taken, got {codec.name!r} for {_place(codec)}, "
                f"which is the name of {_place(taken)}; give the class a `name` of its own"
            )
        self._types[codec.name] = codec
        for listener in self._listeners:
            listener(codec.name)

    def on_add(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with the name of every codec that is added from now on."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        entries: dict[str, EntryPoint] = {}
        for entry in entry_points(group=GROUP):
            if entry.name in self._own:
                log.warning(
                    "codec %r of %s is ignored: lightning_dist has a codec of that name; rename it",
                    entry.name,
                    entry.value,
                )
            else:
                entries.setdefault(entry.name, entry)
        return entries


def _load(entry: EntryPoint, *, into: CodecTable) -> None:
    package = entry.dist.name if entry.dist else entry.value
    try:
        codec = entry.load()
    except Exception as error:
        raise ValueError(
            f"codec {entry.name!r} must be importable as {entry.value} from the package "
            f"{package!r}, got {type(error).__name__}: {error}; fix or remove that package"
        ) from error
    into.add(codec)
    if codec.name != entry.name:
        raise ValueError(
            f"An entry point of {GROUP} must have the name of its codec, got {entry.name!r} for "
            f"{codec.name!r} in the package {package!r}; rename one of them"
        )


def _check(codec: Any) -> None:
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise ValueError(
            f"A codec must be a class derived from lightning_dist.Codec, got {codec!r}; derive it "
            "from lightning_dist.BlockCodec"
        )
    parameters = vars(codec).get("__dataclass_params__")
    if not is_dataclass(codec) or parameters is None or not parameters.frozen:
        raise ValueError(
            f"A codec must be a frozen dataclass, got {_place(codec)}; write @register_codec above "
            "@dataclass(frozen=True)"
        )
    name = getattr(codec, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"The name of a codec must be lower-case letters, digits and underscores, got {name!r} "
            f"for {_place(codec)}; set `name: ClassVar[str]`"
        )
    exchange = getattr(codec, "exchange", None)
    if exchange not in EXCHANGES:
        raise ValueError(
            f"The exchange of a codec must be one of {tuple(EXCHANGES)}, got {exchange!r} for "
            f"{_place(codec)}; set `exchange: ClassVar[str]`"
        )
    try:
        codec()
    except TypeError as error:
        raise ValueError(
            f"A codec must have all methods, and a default for every option, got {error}; give "
            f"{_place(codec)} what is missing"
        ) from None


def _place(codec: type) -> str:
    return f"{codec.__module__}.{codec.__qualname__}"


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
    return [known for known in near if likeness(known) == likeness(near[0])]


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
