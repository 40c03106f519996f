"""Settings that every strategy of this package refuses, before any process group exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from lightning_dist.codecs import CODECS
from lightning_dist.settings.options import unknown

F = TypeVar("F", bound=Callable[..., None])
G = TypeVar("G", bound=Callable[..., Any])
_HOOK_ARGUMENTS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


def refuse_ddp_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of DDP that cannot take effect beside our hook."""
    size = arguments.get("bucket_cap_mb")
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    if size is not None and not (is_number and size > 0):
        raise ValueError(
            f"bucket_cap_mb must be a number of MiB above 0, got {size!r}; DDP's default is 25"
        )
    for name in _HOOK_ARGUMENTS:
        if arguments.get(name) is not None:
            remedy = "leave it out, or use DDPStrategy with that hook"
            raise second_hook(f"{name}={arguments[name]!r}", owner="compressed_ddp", remedy=remedy)
    if arguments.get("mixed_precision") is not None:
        raise ValueError(
            "DDP's mixed_precision= installs a communication hook of its own, and a model takes "
            "one; leave it out and use precision='bf16-mixed' or '16-mixed'"
        )
    if arguments.get("skip_all_reduce_unused_params"):
        raise ValueError(
            "skip_all_reduce_unused_params=True makes DDP skip buckets, and the compressed step "
            "ends with the last one; leave it out"
        )


def second_hook(got: str, *, owner: str, remedy: str) -> ValueError:
    """The error for a communication hook beside the one that ``owner`` registers."""
    return ValueError(
        f"A model takes one communication hook and {owner} registers its own, got {got}; {remedy}"
    )


def refuse_unknown(
    arguments: Mapping[str, Any], *, of: type, handed_to: Callable[..., None] = object.__init__
) -> None:
    """Raise ValueError for arguments that neither a class nor what it hands them to has.

    Strategies hand on what they do not know, and DDP would refuse it in all ranks at once, later;
    callbacks to a class of Lightning's, whose name the user has not written.
    """
    constructors = [vars(cls)["__init__"] for cls in of.__mro__ if "__init__" in vars(cls)]
    own: dict[str, None] = {}  # in their order
    theirs: dict[str, None] = dict.fromkeys(("self", "module"))
    for function in (*constructors, handed_to):
        is_own = getattr(function, "__module__", "").startswith("lightning_dist.")
        for name, parameter in signature(function).parameters.items():
            if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                (own if is_own else theirs)[name] = None
    listed = ", ".join(name for name in own if name not in theirs)
    known = tuple(name for name in own | theirs if name not in ("self", "module"))
    base = next(cls for cls in of.__mro__ if not cls.__module__.startswith("lightning_dist."))
    if theirs.keys() & known:
        listed += f", and those of {base.__name__}"
    for name in arguments:
        if name not in known:
            raise ValueError(unknown(name, known, where=of.__name__, listed=listed))


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


def refuses_unknown(wrapper: Callable[..., Any]) -> Callable[[G], G]:
    """Decorator of a function that takes a model: ValueError for arguments that it does not have.

    Args:
        wrapper: has wrapped the model before, and takes some that are given here by mistake.
    """

    def decorate(function: G) -> G:
        known = signature(function)
        name_of = function.__name__

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            others = {name: kwargs[name] for name in kwargs if name not in known.parameters}
            if others:
                own = {name: kwargs[name] for name in kwargs if name not in others}
                codec = known.bind_partial(*args, **own).arguments.get("codec", "int8")
                refuse_codec_options(others, codec, of=function)
                for name in others:
                    if name in signature(wrapper).parameters:
                        raise ValueError(
                            f"Unknown setting {name!r} in {name_of}: it is an argument of "
                            f"{wrapper.__name__}, give it there"
                        )
                    raise ValueError(unknown(name, tuple(known.parameters)[1:], where=name_of))
            return function(*args, **kwargs)

        return cast(G, call)

    return decorate


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


def refuse_pytorch_lightning(**objects: Any) -> None:
    """Raise ValueError for objects of the package `pytorch_lightning`.

    It holds a second copy of every class, so that isinstance fails in places far from here.
    """
    for role, given in objects.items():
        packages = [cls.__module__.split(".")[0] for cls in type(given).__mro__]
        foreign = {"pytorch_lightning", "lightning_fabric"}.intersection(packages)
        if foreign:
            raise ValueError(of_other_package(f"{role} ({type(given).__name__})", foreign.pop()))


def of_other_package(what: str, package: str) -> str:
    """The message for something of the package `pytorch_lightning` or `lightning_fabric`."""
    return (
        f"lightning_dist works with the package 'lightning', and {what} comes from {package!r}, "
        "whose classes are different ones; write 'import lightning as L', not "
        "'import pytorch_lightning'"
    )
