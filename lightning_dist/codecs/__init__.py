"""Gradient <-> wire bytes. Pure torch: nothing here knows of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeVar

from lightning_dist.codecs.base import BlockCodec, Codec, Payload, Plane
from lightning_dist.codecs.cast import BF16, FP16
from lightning_dist.codecs.dgc import DGC
from lightning_dist.codecs.fp8 import FP8
from lightning_dist.codecs.int4 import Int4
from lightning_dist.codecs.int8 import Int8
from lightning_dist.codecs.memory import ErrorFeedback, Memory, NoMemory
from lightning_dist.codecs.none import NoCompression, Uncompressed
from lightning_dist.codecs.options import CodecTable, parse_codec
from lightning_dist.codecs.policies import (
    NORMS_BIASES_EMBEDDINGS,
    ByName,
    BySize,
    Schedule,
)
from lightning_dist.codecs.powersgd import PowerSGD
from lightning_dist.codecs.qsgd import QSGD
from lightning_dist.codecs.randomk import RandomK
from lightning_dist.codecs.sign import Sign
from lightning_dist.codecs.terngrad import TernGrad
from lightning_dist.codecs.threshold import Threshold
from lightning_dist.codecs.topk import TopK

CODECS = CodecTable(
    (
        NoCompression,
        FP16,
        BF16,
        Int8,
        Int4,
        FP8,
        Sign,
        QSGD,
        TernGrad,
        TopK,
        DGC,
        RandomK,
        Threshold,
        PowerSGD,
    )
)
"""Codec classes by name, as in ``codec="..."``."""

_C = TypeVar("_C", bound=Codec)


def register_codec(codec: type[_C]) -> type[_C]:
    """Decorator that adds a class to :data:`CODECS`.

    The codec is then available as ``codec="name:option=value"`` in every framework, as the strategy
    ``compressed_ddp_<name>``, in ``lightning-dist codecs`` and in the benchmarks. Every rank must
    register it. An installed package can do so by an entry point of the group
    ``lightning_dist.codecs``, without an import.

    Args:
        codec: a frozen dataclass with a default for every option.

    Raises:
        ValueError: it is not such a class, or the name is taken.
    """
    CODECS.add(codec)
    return codec


def resolve_codec(codec: str | Codec | Mapping[str, Any]) -> Codec:
    """Codec object of a name with options, or of a policy as a mapping; an object as it is.

    Raises:
        ValueError: unknown name or option, or not a codec; the message lists the known ones.
    """
    if isinstance(codec, Mapping):
        return _policy(codec)
    return codec if isinstance(codec, Codec) else parse_codec(codec, CODECS)


def by_size(codec: str | Codec | Mapping[str, Any], *, min_numel: int | None = None) -> Codec:
    """``codec`` for tensors of two or more dimensions and at least ``min_numel`` elements.

    The others are sent uncompressed. None: the codec's own limit; 0: everything is compressed.
    """
    if min_numel is not None and min_numel < 0:
        raise ValueError(
            f"min_numel must be 0 (compress every tensor) or more elements, got {min_numel}"
        )
    return BySize(resolve_codec(codec), min_numel)


def by_name(
    codec: str | Codec | Mapping[str, Any],
    rules: Mapping[str, str | Codec | Mapping[str, Any]] = {NORMS_BIASES_EMBEDDINGS: "none"},
) -> Codec:
    """Codec of the first rule whose regular expression matches a part of the parameter's name.

    ``codec`` where none matches. By default norms, biases and embeddings are sent uncompressed.
    """
    pairs = tuple((pattern, resolve_codec(chosen)) for pattern, chosen in rules.items())
    return ByName(resolve_codec(codec), pairs)


def warmup(phases: Mapping[int, str | Codec | Mapping[str, Any]]) -> Codec:
    """Codecs by synchronised step: ``warmup({0: "none", 200: "int8", 1000: "int4"})``."""
    return Schedule(tuple((step, resolve_codec(codec)) for step, codec in phases.items()))


def after_steps(
    steps: int,
    codec: str | Codec | Mapping[str, Any],
    *,
    before: str | Codec | Mapping[str, Any] = "none",
) -> Codec:
    """``before`` for the first ``steps`` synchronised steps, then ``codec``."""
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(
            f"steps must be 0 or more synchronised steps, got {steps!r}; write "
            "after_steps(500, 'int8')"
        )
    return warmup({0: before, steps: codec}) if steps else resolve_codec(codec)


POLICIES: dict[str, Callable[..., Codec]] = {
    policy.__name__: policy for policy in (by_size, by_name, warmup, after_steps)
}


def _policy(written: Mapping[str, Any]) -> Codec:
    """The policy of a mapping from its name to its arguments, or to the phases of `warmup`."""
    name, arguments = next(iter(written.items()), ("", None))
    if len(written) != 1 or name not in POLICIES or not isinstance(arguments, Mapping):
        raise ValueError(
            f"A policy is a mapping from one of {', '.join(POLICIES)} to its arguments, such as "
            f"{{'by_size': {{'codec': 'int4', 'min_numel': 65536}}}}, got {dict(written)!r}"
        )
    try:
        return warmup(arguments) if name == "warmup" else POLICIES[name](**arguments)
    except (AttributeError, TypeError) as error:  # of an argument that is missing or no mapping
        raise ValueError(
            f"{name} takes {', '.join(signature(POLICIES[name]).parameters)}, got "
            f"{dict(arguments)!r}: {error}"
        ) from error


__all__ = [
    "BF16",
    "CODECS",
    "DGC",
    "FP8",
    "FP16",
    "POLICIES",
    "QSGD",
    "BlockCodec",
    "Codec",
    "ErrorFeedback",
    "Int4",
    "Int8",
    "Memory",
    "NoCompression",
    "NoMemory",
    "Payload",
    "Plane",
    "PowerSGD",
    "RandomK",
    "Sign",
    "TernGrad",
    "Threshold",
    "TopK",
    "Uncompressed",
    "after_steps",
    "by_name",
    "by_size",
    "register_codec",
    "resolve_codec",
    "warmup",
]
