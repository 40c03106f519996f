"""Signatures and documentation of functions and classes whose arguments are settings."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dist.codecs import CODECS, Codec
from lightning_dist.settings.declared import Setting, settings_of
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.options import OPTIONS, require_only, unknown

F = TypeVar("F", bound=Callable[..., None])
R = TypeVar("R")
Refusal: TypeAlias = Callable[[Mapping[str, Any], Callable[..., Any]], None]
_TYPES = {
    "Codec": Codec,
    "OuterOptimizer": Callable[[Sequence[Tensor]], Optimizer],
    "OuterSchedule": Callable[[Optimizer], LRScheduler],
}
"""Names in the types of settings whose modules are not imported where they are declared."""


def takes(
    family: type[Any],
    name: str = "settings",
    *,
    make: Callable[..., Any] | None = None,
    refuse: Refusal | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator: arguments of a function are the settings of a family, which it gets as one object.

    The function has a parameter ``name``, with a line under "Args" of its docstring. What users see
    and give in its place, signature and documentation, is from the family; so are checks and
    defaults. An object of the family is taken as it is, without ``make``. ::

        @takes(ExchangeSettings)
        def compress(model: nn.Module, settings: ExchangeSettings, *, groups: Any = None): ...

        compress(model, "int4", start_step=100)

    Args:
        family: a dataclass whose fields are made by :func:`~.declared.setting`.
        make: makes what the function gets, of the settings that were given; None: the family.
        refuse: raises for arguments that the function does not have, where it knows more of them.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        own, offered = signature(function), settings_of(family)
        place = [*own.parameters].index(name)
        shown = _shown(own, family, offered, name)
        is_open = any(
            parameter.kind is Parameter.VAR_KEYWORD for parameter in own.parameters.values()
        )

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            of = type(args[0]) if function.__name__ == "__init__" else function
            if name in kwargs:
                raise ValueError(unknown(name, tuple(shown.parameters)[1:], where=of.__name__))
            if make is None and len(args) > place and isinstance(args[place], family):
                _require_once(offered.keys() & kwargs.keys(), of=of)
                _require_kind(args[place], _family_of(of, family), of=of)
                return function(*args, **kwargs)
            if issubclass(family, ExchangeSettings):  # defaults of other families are left out
                options = {
                    keyword: kwargs.pop(keyword) for keyword in [*kwargs] if keyword in OPTIONS
                }
                kwargs |= require_only(options, family)
            if not is_open:
                others = {
                    keyword: kwargs[keyword]
                    for keyword in kwargs
                    if keyword not in shown.parameters
                }
                codec = args[place] if len(args) > place else kwargs.get("codec", "int8")
                if issubclass(family, ExchangeSettings):
                    refuse_codec_options(others, codec, of=of)
                if refuse is not None:
                    refuse(others, of)
                for other in others:
                    raise ValueError(unknown(other, tuple(shown.parameters)[1:], where=of.__name__))
            bound = shown.bind(*args, **kwargs).arguments
            chosen = {name: bound.pop(name) for name in offered if name in bound}
            before, after = _parted(own, bound, name)
            return function(*before, **{name: (make or family)(**chosen)}, **after)

        call.__signature__ = shown  # type: ignore[attr-defined]
        call.settings = family  # type: ignore[attr-defined]
        call.__doc__ = _documented(function.__doc__ or "", name, offered)
        return call

    return decorate


def _require_once(names: Collection[str], *, of: Callable[..., Any]) -> None:
    if names:
        raise ValueError(
            f"{of.__name__} has got its settings as one object, and {', '.join(sorted(names))} "
            "beside it; set them there"
        )


def _family_of(of: Callable[..., Any], family: type[Any]) -> type[Any]:
    """The family that users of a class give: of its first constructor that takes one."""
    bases = of.__mro__ if isinstance(of, type) else ()
    found = (getattr(vars(base).get("__init__"), "settings", None) for base in bases)
    return next(
        (settings for settings in found if settings is not None and issubclass(settings, family)),
        family,
    )


def _require_kind(settings: Any, family: type[Any], *, of: Callable[..., Any]) -> None:
    if getattr(settings, "kind", "") != getattr(family, "kind", ""):
        raise ValueError(
            f"{of.__name__} takes settings of {family.__name__}, got {type(settings).__name__}, of "
            "which some cannot take effect; make the former"
        )


def _parted(
    own: Signature, bound: Mapping[str, Any], name: str
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments before the parameter ``name``, and those after it, which are given by name."""
    before, after = list[Any](), dict[str, Any]()
    names = [*own.parameters]
    for index, (each, parameter) in enumerate(own.parameters.items()):
        if each not in bound:
            continue
        if parameter.kind is Parameter.VAR_KEYWORD:
            after.update(bound[each])
        elif parameter.kind is Parameter.VAR_POSITIONAL:
            before += bound[each]
        elif index < names.index(name):
            before.append(bound[each])
        else:
            after[each] = bound[each]
    return before, after


def _shown(
    own: Signature, family: type[Any], offered: Mapping[str, Setting], name: str
) -> Signature:
    """Signature with settings in the place of the one object; with types, not their texts."""
    names: dict[str, Any] = {}
    for base in reversed(family.__mro__):
        names |= vars(sys.modules[base.__module__])
    names |= _TYPES
    hints = {field.name: str(field.type) for field in fields(family)}
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != name]
    for each, declared in offered.items():
        how = Parameter.POSITIONAL_OR_KEYWORD if declared.positional else Parameter.KEYWORD_ONLY
        kind = eval(declared.accepts or hints[each], names)
        parameters.append(Parameter(each, how, default=declared.default, annotation=kind))

    def order(each: Parameter) -> tuple[int, bool]:  # settings after a model, before a grad_scaler
        is_positional = each.kind is Parameter.POSITIONAL_OR_KEYWORD
        return each.kind, (each.name in offered) is is_positional

    return own.replace(parameters=sorted(parameters, key=order))


def _documented(text: str, name: str, offered: Mapping[str, Setting]) -> str:
    """A docstring with a line for each setting in the place of the one object's."""
    found = re.search(rf"^( *){name}: .*\n(?:\1 +\S.*\n)*", text, re.MULTILINE)
    if found is None:  # python -OO
        return text
    indent = found[1]
    lines = (
        textwrap.fill(
            f"{each}: {declared.meaning}",
            width=96,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for each, declared in offered.items()
    )
    return text.replace(found[0], "\n".join(lines) + "\n")


def arguments_of(wrapper: Callable[..., Any]) -> Refusal:
    """Refusal of arguments that are given by mistake: of what has wrapped the model before."""

    def refuse(arguments: Mapping[str, Any], of: Callable[..., Any]) -> None:
        for name in arguments.keys() & signature(wrapper).parameters.keys():
            raise ValueError(
                f"Unknown setting {name!r} in {of.__name__}: it is an argument of "
                f"{wrapper.__name__}, give it there"
            )

    return refuse


def shows_arguments_of(base: type) -> Callable[[F], F]:
    """Decorator of an ``__init__(self, *args, ..., **kwargs)`` that hands the rest to ``base``.

    Its signature, which programs read to offer and convert arguments, has those of ``base`` too.
    """

    def decorate(function: F) -> F:
        shown: Any = function
        own = signature(function)
        self, *rest = own.parameters.values()
        ours = [parameter for parameter in rest if parameter.kind is Parameter.KEYWORD_ONLY]
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
    family = next(
        (constructor.settings for constructor in constructors if hasattr(constructor, "settings")),
        None,
    )
    hidden = set() if family is None else OPTIONS.keys() - settings_of(family).keys()
    own: dict[str, None] = {}  # in their order
    theirs: dict[str, None] = dict.fromkeys(("self", "module"))
    for function in (*constructors, handed_to):
        is_own = getattr(function, "__module__", "").startswith("lightning_dist.")
        for name, parameter in signature(function).parameters.items():
            is_one = parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            if is_one and name not in {*hidden, "settings"}:
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
