"""What a user can set, checked before any process group exists."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from lightning_dist._version import __version__
from lightning_dist.codecs import Codec, resolve_codec


@dataclass(frozen=True)
class Settings:
    """Everything that decides what travels. Equal on all ranks, or the start fails."""

    codec: Codec
    error_feedback: bool  # keep what a codec loses and send it later; 4 bytes per element
    min_compress_numel: int  # larger: fewer small tensors compressed; 0 compresses all
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
        if error_feedback not in (True, False, "auto"):
            raise ValueError(
                f"error_feedback must be True, False or 'auto', got {error_feedback!r}"
            )
        if hierarchical not in (False, "auto"):
            raise ValueError(
                f"hierarchical must be 'auto' or False in this version, got {hierarchical!r}: the "
                "hierarchical exchange is not built yet, all exchanges are flat; leave it out"
            )
        if min_compress_numel is None:
            min_compress_numel = resolved.min_numel
        elif min_compress_numel < 0:
            raise ValueError(
                f"min_compress_numel must be 0 (compress every tensor) or more elements, got "
                f"{min_compress_numel}"
            )
        if start_step < 0:
            raise ValueError(f"start_step must be 0 or more synchronised steps, got {start_step}")
        if compile_kernels not in (True, False, "auto"):
            raise ValueError(
                f"compile_kernels must be True, False or 'auto', got {compile_kernels!r}"
            )
        keeps = resolved.keeps_residual if error_feedback == "auto" else bool(error_feedback)
        return cls(
            codec=resolved,
            error_feedback=keeps and not resolved.lossless,
            min_compress_numel=min_compress_numel,
            start_step=start_step,
            compile_kernels=compile_kernels,
        )

    def fingerprint(self) -> dict[str, Any]:
        """The facts that must be equal on all ranks, JSON-able."""
        return {
            "lightning_dist": __version__,
            "torch": torch.__version__.split("+")[0],
            "codec": self.codec.name,
            **{f"codec.{key}": value for key, value in asdict(self.codec).items()},
            "error_feedback": self.error_feedback,
            "min_compress_numel": self.min_compress_numel,
            "start_step": self.start_step,
        }
