"""What the launcher and the ranks of the step-time benchmark agree on; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DDP_ROW = "ddp"
FP16_ROW = "torch-fp16-hook"
COMPUTE_ROW = "no-comm"
BASELINES = (COMPUTE_ROW, DDP_ROW, FP16_ROW)
NO_FEEDBACK_SUFFIX = "-noef"

ONE_BUCKET_SUFFIX = "-one-bucket"
POWERSGD_ROW = "torch-powersgd"
PER_TENSOR_ROW = "torch-quant-pertensor"
PER_CHANNEL_ROW = "torch-quant-perchannel"
RISKY_BASELINES = (POWERSGD_ROW, PER_TENSOR_ROW, PER_CHANNEL_ROW)
"""torch's hooks of more than one collective. They may end or hang the process, so each is tried in
processes of its own before it joins the others."""

WIDTH = 1024
LAYERS = 10  # of Linear(WIDTH, WIDTH)
GRADIENT_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)

FEWEST_ROUNDS = 3
MOST_ROUNDS = 20


@dataclass(kw_only=True)
class Settings:
    """What the launcher tells every rank."""

    rows: list[str]
    outputs: list[str]  # one path for every link
    gate: str
    warmup: int  # rounds before the timed ones, on the first link
    rounds: int | None  # None: as many as fit into `seconds`, within the bounds above
    seconds: float  # for each link, warm-up included
    batch: int
    seed: int


def is_torch_row(row: str) -> bool:
    """Whether nothing of ours communicates for the row."""
    return row in BASELINES or row.removesuffix(ONE_BUCKET_SUFFIX) in RISKY_BASELINES
