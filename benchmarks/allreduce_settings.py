"""What the launcher and the ranks of the step-time benchmark agree on; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DDP_ROW = "ddp"
FP16_ROW = "torch-fp16-hook"
COMPUTE_ROW = "no-comm"
BASELINES = (COMPUTE_ROW, DDP_ROW, FP16_ROW)
NO_FEEDBACK_SUFFIX = "-noef"

WIDTH = 1024
LAYERS = 10  # of Linear(WIDTH, WIDTH)
GRADIENT_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)


@dataclass(kw_only=True)
class Settings:
    """What the launcher tells every rank."""

    rows: list[str]
    outputs: list[str]  # one path for every link
    gate: str
    warmup: int  # rounds before the timed ones, on the first link
    rounds: int
    batch: int
    seed: int
