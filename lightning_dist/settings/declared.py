"""Declaration of a setting in the field of a dataclass: default, rule, meaning and question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from inspect import Parameter
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class AllowedValues:
    """Values that a setting takes.

    Args:
        takes: what a value must be, in Python's words, for messages and documents.
        fits: whether a value is one.
    """

    takes: str
    fits: Callable[[Any], bool]

    @property
    def in_yaml(self) -> str:
        """Text of the rule for YAML files, variables and command lines: null, true, false."""
        words = {"None": "null", "True": "true", "False": "false"}
        text = re.sub(r"\b(None|True|False)\b", lambda found: words[found[0]], self.takes)
        return text.replace("'", "")


def choice(*values: bool | str | None) -> AllowedValues:
    """Rule of a setting that has one of these values."""
    *first, last = map(repr, values)
    return AllowedValues(f"{', '.join(first)} or {last}", lambda value: _is_one_of(value, values))


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    return any(type(value) is type(allowed) and value == allowed for allowed in values)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, also one of numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def count(unit: str, *, least: int = 0) -> AllowedValues:
    """Rule of a setting that is a whole number."""
    return AllowedValues(
        f"{least} or more {unit}", lambda value: is_whole(value) and value >= least
    )


def number(takes: str, fits: Callable[[float], bool] = lambda value: True) -> AllowedValues:
    """Rule of a setting that is a number."""
    return AllowedValues(takes, lambda value: _is_number(value) and fits(value))


def optional(rule: AllowedValues, meaning: str) -> AllowedValues:
    """Rule of a setting that may be None, which has a meaning."""
    return AllowedValues(
        f"{rule.takes}, or None ({meaning})", lambda value: value is None or rule.fits(value)
    )


@dataclass(frozen=True)
class Setting:
    """One setting of a family: an argument, a variable, a key of files, a line of documents.

    Args:
        default: value where nobody has set another one.
        rule: None where the value is an object that the family checks itself.
        meaning: its line under "Args".
        accepts: type of the argument, where the field holds another one; "": that of the field.
        under: kinds of training in which it takes effect, of the ``kind`` of families; (): all.
        ask: question of ``lightning-dist config``; "": it is not asked.
        outside: whether variables and files may set it.
        objects: whether code may give objects that ``rule`` does not know; the family checks them.
        by_method: whether None in files is the default, whatever that of the code.
        positional: whether it may be given without its name.
        name: of the field.
    """

    default: Any
    rule: AllowedValues | None
    meaning: str
    accepts: str = ""
    under: tuple[str, ...] = ()
    ask: str = ""
    outside: bool = True
    objects: bool = False
    by_method: bool = False
    positional: bool = False
    name: str = ""

    @property
    def outside_default(self) -> Any:
        """Value in files and variables that is the same as none."""
        return None if self.by_method else self.default

    @property
    def outside_rule(self) -> AllowedValues:
        """Rule of a value in files and variables."""
        assert self.rule is not None
        return optional(self.rule, "the method's default") if self.by_method else self.rule


REQUIRED = Parameter.empty
"""Default of a setting that has none."""


def setting(default: Any, rule: AllowedValues | None, meaning: str, **others: Any) -> Any:
    """Field of a dataclass that declares a setting; ``others`` as of :class:`Setting`."""
    declared = Setting(default, rule, meaning, **others)
    value = MISSING if default is REQUIRED else default
    return field(default=value, metadata={"setting": declared}, kw_only=not declared.positional)


def settings_of(family: type[Any]) -> Mapping[str, Setting]:
    """Settings that take effect in a family by name: its own, then those of its bases."""

    def place(of: Field[Any]) -> tuple[int, int]:
        declared = [[*vars(base).get("__annotations__", ())] for base in family.__mro__]
        base = next(i for i, names in enumerate(declared) if of.name in names)
        return base, declared[base].index(of.name)

    found = {}
    for found_field in sorted(fields(family), key=place):
        declared: Setting | None = found_field.metadata.get("setting")
        if declared is not None and (not declared.under or family.kind in declared.under):
            found[found_field.name] = replace(declared, name=found_field.name)
    return found


def check_values(settings: Any) -> None:
    """Raise ValueError where a setting of an object of a family has a value against its rule."""
    for name, declared in settings_of(type(settings)).items():
        value, rule = getattr(settings, name), declared.rule
        if rule is not None and not declared.objects and not rule.fits(value):
            raise ValueError(f"{name} must be {rule.takes}, got {value!r}")
