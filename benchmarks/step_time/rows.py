"""Names of the rows of the step-time benchmark, and what ranks are told; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.launch import Layout

DDP_ROW = "ddp"
FP16_ROW = "torch-fp16-hook"
COMPUTE_ROW = "no-comm"
BASELINES = (COMPUTE_ROW, DDP_ROW, FP16_ROW)

POWERSGD_ROW = "torch-powersgd"
ONE_BUCKET_ROW = "torch-powersgd-one-bucket"
PER_TENSOR_ROW = "torch-quant-pertensor"
PER_CHANNEL_ROW = "torch-quant-perchannel"
RISKY_BASELINES = (POWERSGD_ROW, ONE_BUCKET_ROW, PER_TENSOR_ROW, PER_CHANNEL_ROW)
"""torch's hooks of more than one collective. They may end or hang the process, so each is tried in
processes of its own before it joins the others."""

NO_FEEDBACK_SUFFIX = "-noef"
WITHOUT_FEEDBACK = ("int8", "int4")
"""Codecs that by default are also measured without error feedback."""

FLAT, SHARDED, LEADER = "flat", "sharded", "leader"
FORMS: dict[str, bool | str] = {FLAT: False, SHARDED: True, LEADER: "leader"}
"""The name of a form -> what `compress_ddp(hierarchical=...)` calls it."""

CODECS_OF = {
    FLAT: ("none", "int8"),
    SHARDED: ("none", "bf16", "int8", "int4", "bf16+int8", "bf16+int4"),
    LEADER: ("none", "bf16", "int8", "int4"),
}
WIDTH = 1024
LAYERS = 10  # of Linear(WIDTH, WIDTH)
GRADIENT_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)

RANK_MODULE = "benchmarks.step_time.rank"

FEWEST_ROUNDS = 3
MOST_ROUNDS = 20


@dataclass(kw_only=True)
class Settings:
    """What the launcher tells every rank."""

    rows: list[str]
    links: list[float | None]  # Mbit/s; measured one after the other
    shaped: list[tuple[str, str]]  # namespaces and devices whose rate they are
    warmup: int  # rounds before the timed ones, on the first link
    rounds: int | None  # None: as many as fit into `seconds`, within the bounds above
    seconds: float  # for each link, warm-up included
    batch: int
    seed: int


def is_torch_row(row: str) -> bool:
    """Whether nothing of ours communicates for the row."""
    return row in BASELINES or row in RISKY_BASELINES


def split_row(row: str) -> tuple[str | None, str]:
    """The form of a row, None where it leaves that to `compress_ddp`, and the rest of its name."""
    form, mark, codec = row.partition("/")  # no name or option of a codec has it in it
    return (form, codec) if mark and form in FORMS else (None, row)


def levels(codec: str) -> tuple[str | None, str]:
    """The codecs within hosts and between them; within hosts None: what `compress_ddp` chooses."""
    intra, mark, inter = codec.partition("+")
    return (intra, inter) if mark else (None, codec)


def codec_rows() -> list[str]:
    """Rows of torch's hooks that may fail, and of every codec there is."""
    from lightning_dist.codecs import CODECS

    rows = [*RISKY_BASELINES]
    for name in CODECS:
        rows += [name, name + NO_FEEDBACK_SUFFIX] if name in WITHOUT_FEEDBACK else [name]
    return rows


def form_rows() -> list[str]:
    """Rows of some codecs in every form of the exchange."""
    return [f"{form}/{codec}" for form, codecs in CODECS_OF.items() for codec in codecs]


def impossible(row: str, layout: Layout) -> str | None:
    """Why a row cannot be measured in this layout; None where it can."""
    form, _ = split_row(row)
    if form not in (SHARDED, LEADER):
        return None
    if max(layout.counts) == 1:
        return "one rank per host: there is nothing to add up within a host"
    if form == SHARDED and not layout.even:
        return "the hosts hold different numbers of ranks, which takes the leader form"
    return None
