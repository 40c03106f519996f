"""What the launcher and the ranks of the step-time benchmark agree on; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.launch import Layout

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

RANK_MODULE = "benchmarks.step_time.rank"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that 10.77.0.1 has no name

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


FLAT, SHARDED, LEADER = "flat", "sharded", "leader"
FORMS: dict[str, bool | str] = {FLAT: False, SHARDED: True, LEADER: "leader"}
"""The name of a form -> what `compress_ddp(hierarchical=...)` calls it."""

_FORM_MARK = "/"  # no name or option of a codec has it in it
_LEVEL_MARK = "+"

FLAT_CODECS = ("none", "int8")
CODECS = ("none", "bf16", "int8", "int4")
SHARDED_CODECS = ("bf16+int8", "bf16+int4")
"""By default: flat, in both hierarchical forms, and in the sharded form only."""
QUICK_FORMS_OF = {FLAT: FLAT_CODECS, SHARDED: ("none", "int8", "bf16+int8"), LEADER: ("int8",)}
DEFAULT_FORMS_OF = {FLAT: FLAT_CODECS, SHARDED: CODECS + SHARDED_CODECS, LEADER: CODECS}


def row_name(form: str, codec: str) -> str:
    """The name of a row of ours."""
    return f"{form}{_FORM_MARK}{codec}"


def split_row(row: str) -> tuple[str | None, str]:
    """The form of a row, None where it leaves that to `compress_ddp`, and the rest of its name."""
    form, mark, codec = row.partition(_FORM_MARK)
    return (form, codec) if mark and form in FORMS else (None, row)


def levels(codec: str) -> tuple[str | None, str]:
    """The codecs within hosts and between them; within hosts None: what `compress_ddp` chooses."""
    intra, mark, inter = codec.partition(_LEVEL_MARK)
    return (intra, inter) if mark else (None, codec)


def rows_of(forms: Sequence[str], codecs: Sequence[str] | None, *, quick: bool) -> list[str]:
    """torch's rows and ours: the named codecs in all forms that know them, or the default ones."""
    names = list(BASELINES)
    for form in forms:
        chosen = codecs or (QUICK_FORMS_OF if quick else DEFAULT_FORMS_OF)[form]
        for codec in dict.fromkeys(chosen):
            if form == FLAT and levels(codec)[0] is not None:
                continue  # a flat exchange has one level
            names.append(row_name(form, codec))
    return names


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
