"""Signatures and documentation of functions and classes whose arguments are settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dist.codecs import CODECS, Codec
from lightning_dist.settings.declared import Setting, settings_of
from lightning_dist.settings.local_updates import Method, Weight
from lightning_dist.settings.options import OPTIONS, no_effect, unknown

F = TypeVar("F", bound=Callable[..., None])
R = TypeVar("R")
_SETTINGS = "settings"
_TYPES = {
    **{"Any": Any, "Literal": Literal, "Mapping": Mapping, "Sequence": Sequence, "Codec": Codec},
    **{"Method": Method, "Weight": Weight},
    "OuterOptimizer": Callable[[Sequence[Tensor]], Optimizer],
    "OuterSchedule": Callable[[Optimizer], LRScheduler],
}
"""Names in the types of settings, which are declared where torch is not imported."""


def takes(
    family: type[Any],
    *,
    wrapper: Callable[..., Any] | None = None,
    make: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator: arguments of a function are the settings of a family, which it gets as one object.

    The function has a parameter ``settings``, with a line under "Args" of its docstring. What users
    see and give in its place, signature and documentation, is from the family; so are checks and
    defaults. An object of the family is taken as it is. ::

        @takes(ExchangeSettings)
        def compress(model: nn.Module, settings: ExchangeSettings, *, groups: Any = None): ...

        compress(model, "int4", start_step=100)

    Args:
        family: a dataclass whose fields are made by :func:`~.declared.setting`.
        wrapper: has wrapped the model before, and takes some that are given here by mistake.
        make: makes what the function gets, of the settings that were given; None: the family.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        own, offered = signature(function), settings_of(family)
        place = [*own.parameters].index(_SETTINGS)
        lead = [*own.parameters][:place]
        shown = _shown(own, family, offered)
        is_open = any(each.kind is Parameter.VAR_KEYWORD for each in own.parameters.values())

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            of = type(args[0]) if function.__name__ == "__init__" else function
            if len(args) > place and isinstance(args[place], family):
                if twice := [name for name in offered if name in kwargs]:
                    raise ValueError(
                        f"{of.__name__} has got its settings as one object, and {', '.join(twice)} "
                        "beside it; write dataclasses.replace(settings, ...)"
                    )
                return function(*args, **kwargs)
            for name in [name for name in kwargs if name in OPTIONS and name not in offered]:
                if (value := kwargs.pop(name)) != OPTIONS[name].outside_default:
                    raise ValueError(no_effect(name, value, family))
            if not is_open:
                given = args[place] if len(args) > place else kwargs.get("codec", "int8")
                others = {name: kwargs[name] for name in kwargs if name not in shown.parameters}
                _refuse(others, given, shown, of=of, wrapper=wrapper)
            bound = shown.bind(*args, **kwargs).arguments
            chosen = {name: bound.pop(name) for name in offered if name in bound}
            leading = [bound.pop(name) for name in lead if name in bound]
            for name, parameter in own.parameters.items():
                if parameter.kind is Parameter.VAR_KEYWORD:
                    bound.update(bound.pop(name, {}))
            return function(*leading, (make or family)(**chosen), **bound)

        call.__signature__ = shown  # type: ignore[attr-defined]
        call.settings = family  # type: ignore[attr-defined]
        call.__doc__ = _documented(function.__doc__ or "", offered)
        return call

    return decorate


def _shown(own: Signature, family: type[Any], offered: Mapping[str, Setting]) -> Signature:
    """Signature with settings in the place of the one object; with types, not their texts."""
    hints = {each.name: str(each.type) for each in fields(family)}
    positional, named = list[Parameter](), list[Parameter]()
    for name, declared in offered.items():
        kind = eval(declared.accepts or hints[name], _TYPES)
        how = Parameter.POSITIONAL_OR_KEYWORD if declared.positional else Parameter.KEYWORD_ONLY
        made = Parameter(name, how, default=declared.default, annotation=kind)
        (positional if declared.positional else named).append(made)
    before, after = list[Parameter](), list[Parameter]()
    for each in own.parameters.values():
        if each.name != _SETTINGS:
            is_named = each.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
            (after if is_named else before).append(each)
    ours = [each for each in after if each.kind is Parameter.KEYWORD_ONLY]
    rest = [each for each in after if each.kind is Parameter.VAR_KEYWORD]
    return own.replace(parameters=[*before, *positional, *named, *ours, *rest])


def _documented(text: str, offered: Mapping[str, Setting]) -> str:
    """A docstring with a line for each setting in the place of the one object's."""
    found = re.search(rf"^( *){_SETTINGS}: .*\n(?:\1 +\S.*\n)*", text, re.MULTILINE)
    if found is None:  # python -OO
        return text
    indent = found[1]
    lines = (
        textwrap.fill(
            f"{name}: {declared.meaning}",
            width=96,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, declared in offered.items()
    )
    return text.replace(found[0], "\n".join(lines) + "\n")


def _refuse(
    arguments: Mapping[str, Any],
    codec: object,
    shown: Signature,
    *,
    of: Callable[..., Any],
    wrapper: Callable[..., Any] | None,
) -> None:
    """Raise ValueError for arguments that a function does not have, with what was meant."""
    refuse_codec_options(arguments, codec, of=of)
    for name in arguments:
        if wrapper is not None and name in signature(wrapper).parameters:
            raise ValueError(
                f"Unknown setting {name!r} in {of.__name__}: it is an argument of "
                f"{wrapper.__name__}, give it there"
            )
        raise ValueError(unknown(name, tuple(shown.parameters)[1:], where=of.__name__))


def shows_arguments_of(base: type) -> Callable[[F], F]:
    """Decorator of an ``__init__(self, *args, ..., **kwargs)`` that hands the rest to ``base``.

    Its signature, which programs read to offer and convert arguments, has those of ``base`` too.
    """

    def decorate(function: F) -> F:
        shown: Any = function
        own = signature(function)
        self, *rest = own.parameters.values()
        ours = [each for each in rest if each.kind is Parameter.KEYWORD_ONLY]
        theirs = signature(base).parameters.values()
        shown.__signature__ = own.replace(parameters=[self, *theirs, *ours])
        return function

    return decorate


def refuse_unknown(
    arguments: Mapping[str, Any], *, of: type, handed_to: Callable[..., None] = object.__init__
) -> None:
    """Raise ValueError for arguments that neither a class nor what it hands them to has.

    Strategies hand on what they do not know, and DDP would refuse it in all ranks at once, later;
    callbacks to a class of Lightning's, whose name the user has not written.
    """
    constructors = [vars(cls)["__init__"] for cls in of.__mro__ if "__init__" in vars(cls)]
    family = next((each.settings for each in constructors if hasattr(each, "settings")), None)
    hidden = set() if family is None else OPTIONS.keys() - settings_of(family).keys()
    own: dict[str, None] = {}  # in their order
    theirs: dict[str, None] = dict.fromkeys(("self", "module"))
    for function in (*constructors, handed_to):
        is_own = getattr(function, "__module__", "").startswith("lightning_dist.")
        for name, parameter in signature(function).parameters.items():
            is_one = parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            if is_one and name not in {*hidden, _SETTINGS}:
                (own if is_own else theirs)[name] = None
    listed = ", ".join(name for name in own if name not in theirs)
    known = tuple(name for name in own | theirs if name not in ("self", "module"))
    base = next(cls for cls in of.__mro__ if not cls.__module__.startswith("lightning_dist."))
    if theirs.keys() & known:
        listed += f", and those of {base.__name__}"
    for name in arguments:
        if name not in known:
            raise ValueError(unknown(name, known, where=of.__name__, listed=listed))


def refuse_codec_options(
    arguments: Mapping[str, Any], codec: object, *, of: Callable[..., Any]
) -> None:
    """Raise ValueError for an option of a codec that was given beside the codec."""
    for name, value in arguments.items():
        own = {
            each: kind
            for each, kind in CODECS.items()
            if name in {option.name for option in fields(kind)}
        }
        if not own:
            continue
        given, colon, options = codec.partition(":") if isinstance(codec, str) else ("", "", "")
        option = f"{name}={value}"
        if type(codec) in own.values():
            meant = f"{type(codec).__name__}({name}={value!r})"
        elif given in own:
            meant = repr(f"{given}:{options},{option}" if colon else f"{given}:{option}")
        else:
            meant = repr(f"{next(iter(own))}:{option}")
        raise ValueError(
            f"Unknown setting {name!r} in {of.__name__}: it is an option of the codec, write "
            f"codec={meant}"
        )
