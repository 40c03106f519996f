"""What a user can set, checked before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_dist._version import __version__
from lightning_dist.codecs import (
    BlockCodec,
    Codec,
    PowerSGD,
    Threshold,
    after_steps,
    resolve_codec,
)
from lightning_dist.codecs.policies import sized


@dataclass(frozen=True)
class Settings:
    """Everything that decides what travels. Equal on all ranks, or the start fails."""

    codec: Codec
    # keep what a codec loses and send it later, 4 bytes per element; "auto": as the codec says
    error_feedback: bool | Literal["auto"]
    # larger: fewer small tensors compressed; 0 compresses all; None: as the codec says
    min_compress_numel: int | None
    start_step: int  # synchronised steps before compression starts
    compile_kernels: bool | Literal["auto"]

    @classmethod
    def check(
        cls,
        codec: str | Codec = "int8",
        *,
        error_feedback: bool | Literal["auto"] = "auto",
        hierarchical: bool | Literal["auto"] = "auto",
        min_compress_numel: int | None = None,
        start_step: int = 0,
        compile_kernels: bool | Literal["auto"] = "auto",
    ) -> Settings:
        """Resolve defaults and refuse what cannot take effect.

        Raises:
            ValueError: with the rule, the value received and what to do.
        """
        resolved = resolve_codec(codec)
        if not isinstance(error_feedback, bool) and error_feedback != "auto":
            raise ValueError(
                f"error_feedback must be True, False or 'auto', got {error_feedback!r}"
            )
        if hierarchical not in (False, "auto"):
            raise ValueError(
                f"hierarchical must be 'auto' or False in this version, got {hierarchical!r}: the "
                "hierarchical exchange is not built yet, all exchanges are flat; leave it out"
            )
        if min_compress_numel is not None and not _is_count(min_compress_numel):
            raise ValueError(
                f"min_compress_numel must be 0 (compress every tensor) or more elements, got "
                f"{min_compress_numel!r}"
            )
        if not _is_count(start_step):
            raise ValueError(f"start_step must be 0 or more synchronised steps, got {start_step!r}")
        if compile_kernels not in (True, False, "auto"):
            raise ValueError(
                f"compile_kernels must be True, False or 'auto', got {compile_kernels!r}"
            )
        for leaf in resolved.leaves():
            if not isinstance(leaf, BlockCodec | PowerSGD | Threshold):
                raise ValueError(
                    f"a codec of your own must be a lightning_dist.codecs.BlockCodec, got {leaf}"
                )
            _check_feedback(leaf, error_feedback)
        return cls(
            codec=resolved,
            error_feedback=error_feedback,
            min_compress_numel=min_compress_numel,
            start_step=start_step,
            compile_kernels=compile_kernels,
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
            "codec": repr(self.codec),
            "error_feedback": self.error_feedback,
            "min_compress_numel": self.min_compress_numel,
            "start_step": self.start_step,
        }


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_feedback(codec: Codec, error_feedback: bool | Literal["auto"]) -> None:
    if error_feedback is True and not codec.contraction:
        raise ValueError(
            f"error feedback diverges with codec {codec}: it may lose more than it is given "
            "(unbiased codecs have high variance instead); leave error_feedback at 'auto'"
        )
    if error_feedback is False and codec.momentum_correction:
        raise ValueError(
            f"codec {codec.name!r} accumulates momentum in its error feedback and does nothing "
            "sensible without; leave error_feedback at 'auto', or use 'topk'"
        )
