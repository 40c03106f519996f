"""What the launcher and the ranks of the convergence benchmark agree on; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DDP_ROW = "ddp"
NO_FEEDBACK_SUFFIX = "-noef"
WARM_SUFFIX = "-warm"
ONEBIT_PREFIX = "onebit-adam:"
WARM_SHARE = 0.2
"""Of the steps, after which rows with a warm-up begin to compress, and 1-bit Adam freezes."""

MIN_COMPRESS_NUMEL = 256
"""Codecs leave tensors below some thousand elements alone, which are most of these small models."""


@dataclass(frozen=True, kw_only=True)
class GptSettings:
    """A byte-level GPT like the demo's and how it is trained; the defaults take about 4 s."""

    steps: int = 160  # of which the learning rate's decay takes all but the warm-up
    context: int = 64
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 4
    batch: int = 16  # windows per step of all ranks together, so more ranks are no more work
    lr: float = 3e-3
    warmup_steps: int = 40  # with 20 the end depends twice as much on the seed
    final_lr: float = 0.1  # share of `lr` at the end; 1: constant after the warm-up
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    hold_out_every: int = 20  # of the files, for validation
    val_windows: int = 256


@dataclass(frozen=True, kw_only=True)
class DigitsSettings:
    """An MLP on scikit-learn's 8 x 8 digits and how it is trained."""

    steps: int = 300
    hidden: int = 128  # of two hidden layers
    batch: int = 64  # images per step of all ranks together
    lr: float = 0.05
    momentum: float = 0.9
    final_lr: float = 0.1
    test_share: float = 0.25
    own_labels: float = 0.8  # share of a rank's images that come from its own labels only


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row of one task: everything but the seed."""

    task: str
    codec: str | None  # None: DDP itself
    error_feedback: bool = True  # False: switched off; True: as the codec has it by default
    warm: bool = False  # uncompressed for the first steps
    onebit: bool = False  # OneBitAdam in place of AdamW
    steps: int | None = None  # None: the task's own

    @property
    def row(self) -> str:
        """The row's name in the table."""
        if self.codec is None:
            return DDP_ROW
        if self.onebit:
            return ONEBIT_PREFIX + self.codec
        suffix = WARM_SUFFIX if self.warm else ""
        return self.codec + suffix + ("" if self.error_feedback else NO_FEEDBACK_SUFFIX)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished training."""

    job: Job
    seed: int
    metrics: Mapping[str, float]
    error_feedback: bool | None  # as it was in effect; None for DDP
    bytes_ratio: float  # fp32 DDP's bytes divided by those sent
    identical: bool  # whether all ranks ended with the same parameters, bit by bit
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A row that did not run, or broke; the other rows go on."""

    job: Job
    reason: str
