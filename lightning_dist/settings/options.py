"""Settings that may be set from outside of the code, and the values they take there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from lightning_dist.settings.declared import Setting, settings_of
from lightning_dist.settings.exchange import ExchangeSettings, ShardedSettings
from lightning_dist.settings.local_updates import LocalUpdateSettings

FAMILIES = (ExchangeSettings, LocalUpdateSettings, ShardedSettings)
"""One for each kind of training."""
OPTIONS: dict[str, Setting] = {}
"""Settings of all families by name, each as the first family has it."""
OBJECTS: set[str] = set()
"""Names of those that only code can set."""
for _family in FAMILIES:
    for _name, _declared in settings_of(_family).items():
        if _declared.outside:
            OPTIONS.setdefault(_name, _declared)
        else:
            OBJECTS.add(_name)


def require_only(options: Mapping[str, Any], family: type[ExchangeSettings]) -> dict[str, Any]:
    """The options of a family; raises ValueError for others that are not the default."""
    own = settings_of(family)
    for name, value in options.items():
        default = OPTIONS[name].outside_default
        if name not in own and value not in (default, getattr(family, name, default)):
            raise ValueError(no_effect(name, value, family))
    return {name: value for name, value in options.items() if name in own}


def no_effect(name: str, value: object, family: type[ExchangeSettings]) -> str:
    """The message for a setting of another family."""
    owner = next(family.kind for family in FAMILIES if name in settings_of(family))
    remedy = family.instead.get(name) or family.instead.get(owner, "remove it")
    return (
        f"{name} is a setting of {owner} and cannot take effect under {family.kind}, got "
        f"{value!r}; {remedy}"
    )


def require_known(name: str, *, where: str) -> Setting:
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
    bare = [name.removeprefix(prefix) for name in known]
    given = str(name).removeprefix(prefix)
    words = set(given.split("_"))
    longer = [name for name in bare if words <= set(name.split("_"))]  # a word was left out
    other = _OTHER_WORDS.get(given)
    near = [other] if other in bare else difflib.get_close_matches(given, longer or bare, n=1)
    valid = f"valid names: {listed or ', '.join(known)}"
    remedy = f"did you mean {prefix + near[0]!r}?" if near else valid
    return f"Unknown setting {str(name)!r} in {where}: {remedy}"


def require_fit(option: Setting, value: object, *, where: str) -> None:
    """Raise ValueError for a value of the wrong type, with the rule and where it was set."""
    rule = option.outside_rule
    if not rule.fits(value):
        raise ValueError(
            f"{option.name} must be {rule.in_yaml}; got {value!r} in {where}; correct it there"
        )
