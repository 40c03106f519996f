"""What the launcher and the ranks of the time-to-accuracy benchmark agree on; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE_ROW = "no-comm"
DDP_ROW = "ddp"
FP16_ROW = "torch-fp16-hook"
BASELINES = (COMPUTE_ROW, DDP_ROW, FP16_ROW)
_SMOOTHED_OVER = 3  # evaluations: one alone goes up and down by what ten steps gain


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the launcher tells every rank."""

    rows: list[str]
    seeds: list[int]
    outputs: list[str]  # one path for every seed
    steps: int  # of fp32 DDP, whose loss after them is the target
    evaluate_every: int  # steps; the resolution of every time and step count
    patience: float  # rows that are not there after `patience * steps` give up
    batch: int  # windows per step of all ranks together
    context: int
    d_model: int
    n_layers: int
    n_heads: int
    lr: float
    val_windows: int
    compile_kernels: bool


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row after some steps: all numbers from its start, without evaluations."""

    step: int
    seconds: float  # of the slowest rank
    tx_bytes: int  # sent by host 0, from its interface's counter
    val_loss: float | None  # None for no-comm, which does not learn together


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of every evaluation and the two before it: what is compared with the target."""
    parts = [losses[max(0, i + 1 - _SMOOTHED_OVER) : i + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]
