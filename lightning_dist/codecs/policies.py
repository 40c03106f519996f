"""Policies: codecs that select a codec by parameter and step.

Each is a codec itself, so they nest::

    by_name("int8", {r"head\\.weight": "int4", r"embed": "none"})
    warmup({0: "none", 200: "int8", 1000: by_size("powersgd:rank=4", min_numel=65536)})
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.codecs.base import Codec, Shape
from lightning_dist.codecs.none import NoCompression, Uncompressed

NORMS_BIASES_EMBEDDINGS = (
    r"(?i)(^|[._])(bias|norm\w*|ln\w*|bn\w*|\w+norm|wte|wpe|emb\w*|\w+_emb|\w*embeddings?)\d*(\.|$)"
)
"""The parameter names that :func:`by_name` leaves uncompressed by default."""


@dataclass(frozen=True)
class _Policy(Codec):
    """Codec that returns others in :meth:`for_tensor` and never encodes itself."""

    def _inner(self) -> tuple[Codec, ...]:
        raise NotImplementedError

    def phase(self, step: int) -> Hashable:
        return tuple(codec.phase(step) for codec in self._inner())

    def boundaries(self) -> tuple[int, ...]:
        return tuple(sorted({turn for codec in self._inner() for turn in codec.boundaries()}))

    def leaves(self) -> tuple[Codec, ...]:
        leaves = (leaf for codec in self._inner() for leaf in codec.leaves())
        return tuple(dict.fromkeys(leaves))


@dataclass(frozen=True)
class BySize(_Policy):
    """See :func:`by_size`."""

    codec: Codec
    smallest: int | None  # None: the codec's own min_numel

    name: ClassVar[str] = "by_size"

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        codec = self.codec.for_tensor(name, shape, step=step)
        least = codec.min_numel if self.smallest is None else self.smallest
        large = len(shape) >= 2 and math.prod(shape) >= least
        return codec if large or least == 0 or codec.lossless else raw_beside(codec)

    def __str__(self) -> str:
        limit = "" if self.smallest is None else f", min_numel={self.smallest}"
        return f"by_size({_quoted(self.codec)}{limit})"

    def _inner(self) -> tuple[Codec, ...]:
        return (self.codec,)

    def leaves(self) -> tuple[Codec, ...]:
        return tuple(dict.fromkeys([*self.codec.leaves(), *map(raw_beside, self.codec.leaves())]))


@dataclass(frozen=True)
class ByName(_Policy):
    """See :func:`by_name`."""

    otherwise: Codec
    rules: tuple[tuple[str, Codec], ...]

    name: ClassVar[str] = "by_name"

    def __post_init__(self) -> None:
        for pattern, _ in self.rules:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"by_name: patterns must be regular expressions, got {pattern!r}: {error}; "
                    f"write {re.escape(pattern)!r} for the characters themselves"
                ) from None

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        otherwise = self.otherwise.for_tensor(name, shape, step=step)
        for pattern, codec in self.rules:
            if re.search(pattern, name):
                chosen = codec.for_tensor(name, shape, step=step)
                return raw_beside(otherwise) if chosen.lossless else chosen
        return otherwise

    def __str__(self) -> str:
        rules = ", ".join(f"{pattern!r}: {_quoted(codec)}" for pattern, codec in self.rules)
        is_default = self.rules == ((NORMS_BIASES_EMBEDDINGS, NoCompression()),)
        return f"by_name({_quoted(self.otherwise)}{'' if is_default else f', {{{rules}}}'})"

    def _inner(self) -> tuple[Codec, ...]:
        return (self.otherwise, *(codec for _, codec in self.rules))

    def leaves(self) -> tuple[Codec, ...]:
        return tuple(dict.fromkeys([*super().leaves(), *map(raw_beside, self.otherwise.leaves())]))


@dataclass(frozen=True)
class Schedule(_Policy):
    """See :func:`warmup` and :func:`after_steps`. Codecs count steps from their own first one.

    A residual that the next codec does not keep is sent in that codec's first finite step.
    """

    phases: tuple[tuple[int, Codec], ...]  # (first step, codec), ascending from 0

    name: ClassVar[str] = "warmup"

    def __post_init__(self) -> None:
        steps: list[object] = [step for step, _ in self.phases]
        whole = all(type(step) is int for step in steps)
        if not whole or steps[:1] != [0] or steps != sorted(set(steps)):  # type: ignore[type-var]
            raise ValueError(
                f"warmup: steps must be whole numbers that start at 0 and ascend, got {steps}; "
                "write warmup({0: 'none', 500: 'int8'})"
            )

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        first, codec = self._at(step)
        return codec.for_tensor(name, shape, step=step - first)

    def phase(self, step: int) -> Hashable:
        first, codec = self._at(step)
        return first, codec.phase(step - first)

    def boundaries(self) -> tuple[int, ...]:
        return tuple(
            sorted({first + t for first, codec in self.phases for t in codec.boundaries()})
        )

    def _at(self, step: int) -> tuple[int, Codec]:
        return [stage for stage in self.phases if stage[0] <= step][-1]

    def __str__(self) -> str:
        phases = ", ".join(f"{step}: {_quoted(codec)}" for step, codec in self.phases)
        return f"warmup({{{phases}}})"

    def _inner(self) -> tuple[Codec, ...]:
        return tuple(codec for _, codec in self.phases)


def sized(codec: Codec, smallest: int | None) -> Codec:
    """``codec`` under the limit ``smallest``, except where a :func:`by_size` in it has its own."""
    if isinstance(codec, BySize):
        return codec
    if isinstance(codec, ByName):
        rules = tuple((pattern, sized(inner, smallest)) for pattern, inner in codec.rules)
        return ByName(sized(codec.otherwise, smallest), rules)
    if isinstance(codec, Schedule):
        return Schedule(tuple((step, sized(inner, smallest)) for step, inner in codec.phases))
    return BySize(codec, smallest)


def _quoted(codec: Codec) -> str:
    """A codec as an argument of a policy."""
    return str(codec) if isinstance(codec, _Policy) else repr(str(codec))


def patterns_of(codec: Codec) -> Iterator[str]:
    """Patterns of every :func:`by_name` in ``codec``."""
    if isinstance(codec, ByName):
        yield from (pattern for pattern, _ in codec.rules)
    if isinstance(codec, _Policy):
        for inner in codec._inner():
            yield from patterns_of(inner)


def raw_beside(codec: Codec) -> NoCompression:
    """Codec of the uncompressed tensors beside ``codec``, in an exchange of the same kind."""
    if EXCHANGES[codec.exchange].linear:
        return NoCompression()
    return Uncompressed(momentum=codec.momentum_correction)
