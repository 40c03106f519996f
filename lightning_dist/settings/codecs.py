"""Codecs that settings name: one for each level, and what is kept of their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning_dist.codecs import (
    CODECS,
    POLICIES,
    BlockCodec,
    Codec,
    NoCompression,
    Uncompressed,
    resolve_codec,
)
from lightning_dist.codecs.memory import KINDS


def by_level(codec: str | Codec | Mapping[str, Any]) -> tuple[Codec, BlockCodec]:
    """The codec between nodes, and the one inside.

    Raises:
        ValueError: a codec that does not exist, or cannot be used inside a node.
    """
    if not isinstance(codec, Mapping) or (codec and set(codec) <= POLICIES.keys()):
        return resolve_codec(codec), NoCompression()
    if set(codec) != {"intra", "inter"}:
        raise ValueError(
            "A codec for each level is {'intra': inside a node, 'inter': between nodes}, got the "
            f"keys {sorted(codec)}; policies are {', '.join(POLICIES)}"
        )
    intra = resolve_codec(codec["intra"]).inside_node()
    if intra is None:
        listed = ", ".join(name for name, kind in CODECS.items() if kind().inside_node())
        raise ValueError(
            "Inside a node gradients are summed without decoding, so 'intra' must be one of "
            f"{listed}, got {codec['intra']!r}; give it to 'inter'"
        )
    return resolve_codec(codec["inter"]), intra


def identity(codec: Codec) -> str:
    """Text of a codec that differs between ranks if they would encode in another way.

    With the classes that are not those of :data:`CODECS`, which may have a name in common.
    """
    leaves = (leaf for leaf in codec.leaves() if type(leaf) is not Uncompressed)
    others = [type(leaf).__qualname__ for leaf in leaves if CODECS.get(leaf.name) is not type(leaf)]
    return f"{codec} ({', '.join(others)})" if others else str(codec)


def check_feedback(codec: Codec, error_feedback: bool | Literal["auto"]) -> None:
    """Raise ValueError unless the errors of a codec can be kept, or lost, as the user wishes."""
    kinds = codec.memory(error_feedback).kinds
    if not set(kinds) <= set(KINDS):
        raise ValueError(
            f"A memory keeps state of the kinds {', '.join(KINDS)}, got {kinds} of codec {codec}; "
            "rename them in its `kinds`"
        )
    if error_feedback is True and not codec.contraction:
        raise ValueError(
            f"Error feedback diverges with codec {codec}: its error may exceed its input; leave "
            "error_feedback at 'auto'"
        )
    if error_feedback is False and codec.momentum_correction:
        raise ValueError(
            f"codec {codec.name!r} accumulates its momentum in error feedback and needs it; leave "
            "error_feedback at 'auto', or use 'topk'"
        )
