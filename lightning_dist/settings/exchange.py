"""Settings of a user, checked before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_dist._version import __version__
from lightning_dist.codecs import (
    CODECS,
    POLICIES,
    BlockCodec,
    Codec,
    NoCompression,
    Uncompressed,
    after_steps,
    resolve_codec,
)
from lightning_dist.codecs.memory import KINDS
from lightning_dist.codecs.policies import sized
from lightning_dist.ranks.levels import Nodes, nodes_of


@dataclass(frozen=True)
class Settings:
    """Everything that decides what travels. Equal on all ranks, or the start fails."""

    codec: Codec  # between nodes, where the exchange is hierarchical
    intra: BlockCodec  # and inside a node
    hierarchical: bool | Literal["auto", "leader"]
    ranks_per_node: int | None  # None: as the names of the nodes say
    rank_groups: Nodes | None
    # keep what a codec loses and send it later, 4 bytes per element; "auto": as the codec says
    error_feedback: bool | Literal["auto"]
    # larger: fewer small tensors compressed; 0 compresses all; None: as the codec says
    min_compress_numel: int | None
    start_step: int  # synchronised steps before compression starts
    compile_kernels: bool | Literal["auto"]
    # when residuals are written: as soon as they are known, or once the whole step has landed
    commit: Literal["auto", "immediate", "deferred"]
    delay: int = 0  # steps after which a mean is applied
    exchange_timeout: float | None = None  # seconds of one wait; None: as the process group says

    @classmethod
    def check(
        cls,
        codec: str | Codec | Mapping[str, Any] = "int8",
        *,
        error_feedback: bool | Literal["auto"] = "auto",
        hierarchical: bool | Literal["auto", "leader"] = "auto",
        ranks_per_node: int | None = None,
        rank_groups: Sequence[Any] | None = None,
        min_compress_numel: int | None = None,
        start_step: int = 0,
        compile_kernels: bool | Literal["auto"] = "auto",
        commit: Literal["auto", "immediate", "deferred"] = "auto",
        delay: int = 0,
        exchange_timeout: float | None = None,
    ) -> Settings:
        """Resolve defaults and refuse what cannot take effect.

        Raises:
            ValueError: with the rule, the value received and what to do.
        """
        resolved, intra = _by_level(codec)
        if not isinstance(error_feedback, bool) and error_feedback != "auto":
            raise ValueError(
                f"error_feedback must be True, False or 'auto', got {error_feedback!r}"
            )
        _check_grouping(hierarchical, ranks_per_node, rank_groups)
        if intra is not None and hierarchical is False:
            raise ValueError(
                f"A codec for each level needs a hierarchical exchange, got codec={codec!r} with "
                "hierarchical=False; give one codec, or leave hierarchical at 'auto'"
            )
        if min_compress_numel is not None and not _is_count(min_compress_numel):
            raise ValueError(
                "min_compress_numel must be 0 (compress every tensor) or more elements, got "
                f"{min_compress_numel!r}"
            )
        if not _is_count(start_step):
            raise ValueError(f"start_step must be 0 or more synchronised steps, got {start_step!r}")
        if compile_kernels not in (True, False, "auto"):
            raise ValueError(
                f"compile_kernels must be True, False or 'auto', got {compile_kernels!r}"
            )
        if commit not in ("auto", "immediate", "deferred"):
            raise ValueError(f"commit must be 'auto', 'immediate' or 'deferred', got {commit!r}")
        if type(delay) is not int or delay not in (0, 1):
            raise ValueError(
                "delay must be 0, or 1: the mean of a step is applied in the next one, got "
                f"{delay!r}"
            )
        if delay and commit == "deferred":
            raise ValueError(
                "commit='deferred' depends on whether a step is applied, which is not known yet "
                "with delay=1; leave commit at 'auto'"
            )
        if exchange_timeout is not None and not (
            type(exchange_timeout) in (int, float) and 0 < exchange_timeout < float("inf")
        ):
            raise ValueError(
                "exchange_timeout must be a number of seconds above 0, or None (the process "
                f"group's own timeout), got {exchange_timeout!r}"
            )
        for leaf in resolved.leaves():
            _check_feedback(leaf, error_feedback)
        return cls(
            codec=resolved,
            intra=NoCompression() if intra is None else intra,
            hierarchical=hierarchical,
            ranks_per_node=ranks_per_node,
            rank_groups=None if rank_groups is None else nodes_of(rank_groups),
            error_feedback=error_feedback,
            min_compress_numel=min_compress_numel,
            start_step=start_step,
            compile_kernels=compile_kernels,
            commit=commit,
            delay=delay,
            exchange_timeout=exchange_timeout,
        )

    @property
    def policy(self) -> Codec:
        """The codec of every parameter at every step, with ``start_step`` and the size limit."""
        return after_steps(self.start_step, sized(self.codec, self.min_compress_numel))

    def fingerprint(self) -> dict[str, Any]:
        """The facts that must be equal on all ranks, JSON-able."""
        return {
            "lightning_dist": __version__,
            "torch": torch.__version__.split("+")[0],
            "codec": identity(self.codec),
            "codec inside a node": identity(self.intra),
            "hierarchical": self.hierarchical,
            "error_feedback": self.error_feedback,
            "min_compress_numel": self.min_compress_numel,
            "start_step": self.start_step,
            "commit": self.commit,
            "delay": self.delay,
        }


def identity(codec: Codec) -> str:
    """Text of a codec that differs between ranks if they would encode in another way.

    With the classes that are not those of :data:`CODECS`, which may have a name in common.
    """
    leaves = (leaf for leaf in codec.leaves() if type(leaf) is not Uncompressed)
    others = [type(leaf).__qualname__ for leaf in leaves if CODECS.get(leaf.name) is not type(leaf)]
    return f"{codec} ({', '.join(others)})" if others else str(codec)


def _by_level(
    codec: str | Codec | Mapping[str, Any],
) -> tuple[Codec, BlockCodec | None]:
    """The codec between nodes, and the one inside where it is named."""
    if not isinstance(codec, Mapping) or (codec and set(codec) <= POLICIES.keys()):
        return resolve_codec(codec), None
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


def _check_grouping(
    hierarchical: bool | Literal["auto", "leader"],
    ranks_per_node: int | None,
    rank_groups: Sequence[Any] | None,
) -> None:
    if not isinstance(hierarchical, bool) and hierarchical not in ("auto", "leader"):
        raise ValueError(
            f"hierarchical must be 'auto', True, False or 'leader', got {hierarchical!r}"
        )
    if ranks_per_node is not None and (type(ranks_per_node) is not int or ranks_per_node < 1):
        raise ValueError(f"ranks_per_node must be 1 or more ranks, got {ranks_per_node!r}")
    if ranks_per_node is not None and rank_groups is not None:
        raise ValueError(
            "ranks_per_node and rank_groups both define the ranks of a node, got "
            f"ranks_per_node={ranks_per_node} and rank_groups={rank_groups!r}; give one"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_feedback(codec: Codec, error_feedback: bool | Literal["auto"]) -> None:
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
