"""The coefficients of the model in `benchmarks/hierarchical_model.py` from measured rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.allreduce_settings import COMPUTE_ROW, DDP_ROW, FP16_ROW, GRADIENT_BYTES
from benchmarks.hierarchical_cost import PLAIN, Work, facts_of, work
from benchmarks.hierarchical_settings import FLAT
from benchmarks.layouts import Layout
from benchmarks.nonnegative import nonnegative_least_squares

ELEMENTS = GRADIENT_BYTES // 4
ROUND = "inter_round_s"
_OVERHEAD = "link_overhead_"  # and the rate
INTRA_BYTE = "intra_byte_s"
_INTRA_ROUND = "intra_round_s"
_INSIDE = (_INTRA_ROUND, INTRA_BYTE)  # and the codecs
_PRIOR = 50.0  # a round of 1 ms counts as much as an error of 5 % in one row
_GRID = 20  # of the overlap
_MOST_TURNS = 50
_TORCH_CODECS = {DDP_ROW: PLAIN.name, FP16_ROW: "fp16"}

Row = Mapping[str, Any]
Coefficients = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured row, as the model sees it."""

    row: Row
    work: Work
    seconds: float  # that communication adds to the step
    crowding: float  # ranks that want to compress, per core, and at least 1


@dataclass(frozen=True, kw_only=True)
class Model:
    """What was fitted. overlap: how much of the shorter side hides behind the longer, 0 to 1."""

    coefficients: Coefficients
    overlap: float


def cases_of(rows: Iterable[Row], *, cores: int) -> list[Case]:
    """The rows the model can speak of: measured, on a limited link, of a fixed size per element."""
    rows = [row for row in rows if row["reason"] is None and row["link_mbit"] is not None]
    floor_ms: dict[str, float] = {}
    for row in rows:
        if row["codec"] == COMPUTE_ROW:  # the same on any link: the least disturbed
            place, step_ms = layout_of(row).name, row["step_ms_median"]
            floor_ms[place] = min(step_ms, floor_ms.get(place, step_ms))
    cases = []
    for row in rows:
        codec: str = row["codec"]
        facts = facts_of(_TORCH_CODECS.get(codec, codec))
        seconds = (row["step_ms_median"] - floor_ms[layout_of(row).name]) / 1e3
        if facts is None or seconds <= 0:
            continue
        intra, inter = facts
        done = work(
            row.get("form") or FLAT,
            layout_of(row),
            inter=inter,
            intra=intra,
            elements=ELEMENTS,
        )
        crowding = max(1.0, done.busy_ranks / cores)
        cases.append(Case(row=row, work=done, seconds=seconds, crowding=crowding))
    return cases


def terms(done: Work, *, link_mbit: float, crowding: float = 1.0) -> Coefficients:
    """By what each coefficient is multiplied."""
    return {
        ROUND: done.inter_rounds,
        overhead_at(link_mbit): done.inter_bytes * 8 / (link_mbit * 1e6),
        _INTRA_ROUND: done.intra_rounds,
        INTRA_BYTE: done.intra_bytes,
        **{_cost(name): count * crowding for name, count in done.elements.items()},
    }


def overhead_at(link_mbit: float) -> str:
    """The coefficient of the bytes over a link of this rate."""
    return f"{_OVERHEAD}{link_mbit:g}"


def extended(model: Model, *, link_mbit: float) -> Model:
    """The model for a rate that was not measured: as the fastest one that was."""
    rates = (name.removeprefix(_OVERHEAD) for name in model.coefficients if _OVERHEAD in name)
    fastest = model.coefficients[overhead_at(max(float(rate) for rate in rates))]
    return replace(model, coefficients={overhead_at(link_mbit): fastest, **model.coefficients})


def predict(model: Model, of: Mapping[str, float]) -> float:
    """Seconds. A codec that was not measured is a KeyError."""
    link = sum(model.coefficients[name] * of[name] for name in of if _of_link(name))
    inside = sum(model.coefficients[name] * of[name] for name in of if not _of_link(name))
    return max(link, inside) + (1 - model.overlap) * min(link, inside)


def fit(cases: Sequence[Case]) -> Model:
    """Non-negative least squares of the relative errors: every row weighs the same.

    A link is no faster than its rate: of its overhead what is above 1 is fitted. Rounds have a
    prior of about a millisecond: with a few ranks they and bytes grow together, and what a fit
    gives to rounds by chance a prediction multiplies by thousands.

    Which of the two sides of a row is the longer one follows from the coefficients, and the other
    way round: they are fitted in turn until nothing changes. `overlap` is the best of a grid.
    """
    if not cases:
        raise ValueError("no measured row that the model can speak of")
    found = [_fit(cases, overlap=step / _GRID) for step in range(_GRID + 1)]
    return min(found, key=lambda model: sum(e * e for e in relative_errors(cases, model)))


def relative_errors(cases: Sequence[Case], model: Model) -> list[float]:
    """(predicted - measured) / measured of every case."""
    return [predict(model, terms_of(case)) / case.seconds - 1 for case in cases]


def summary_of(errors: Sequence[float]) -> dict[str, float]:
    """What the errors look like, without their signs."""
    sizes = [abs(error) for error in errors]
    return {"rows": len(sizes), "median": median(sizes), "largest": max(sizes)}


def byte_error(case: Case) -> float:
    """(formula - interface's counter) / counter of the bytes over the busiest host's link."""
    layout = layout_of(case.row)
    counted: float = case.row["wire_bytes"] * layout.world_size / layout.hosts
    return case.work.inter_bytes / counted - 1


def layout_of(row: Row) -> Layout:
    """Rows of `benchmarks/allreduce.py` have no `layout`."""
    return Layout.of(row["ranks_per_host"], hosts=row["hosts"])


def terms_of(case: Case) -> Coefficients:
    """By what each coefficient is multiplied for a measured row."""
    return terms(case.work, link_mbit=case.row["link_mbit"], crowding=case.crowding)


def _fit(cases: Sequence[Case], *, overlap: float) -> Model:
    factors = [terms_of(case) for case in cases]
    names = list(dict.fromkeys([ROUND, *_INSIDE, *(name for of in factors for name in of)]))
    matrix = np.array([[of.get(name, 0.0) for name in names] for of in factors])
    matrix /= np.array([case.seconds for case in cases])[:, None]
    of_link = np.array([_of_link(name) for name in names])
    prior = _PRIOR * np.diag([float(name in (ROUND, _INTRA_ROUND)) for name in names])
    least = np.array([float(name.startswith(_OVERHEAD)) for name in names])
    link_longer = np.ones(len(cases), dtype=bool)
    for _ in range(_MOST_TURNS):
        shorter = link_longer[:, None] != of_link
        weighted = np.where(shorter, 1 - overlap, 1.0) * matrix
        rest = np.concatenate([1 - weighted @ least, np.zeros(len(names))])
        found = least + nonnegative_least_squares(np.concatenate([weighted, prior]), rest)
        before = link_longer
        link_longer = matrix[:, of_link] @ found[of_link] >= matrix[:, ~of_link] @ found[~of_link]
        if (link_longer == before).all():
            break
    return Model(coefficients=dict(zip(names, found.tolist(), strict=True)), overlap=overlap)


def _of_link(name: str) -> bool:
    return name == ROUND or name.startswith(_OVERHEAD)


def _cost(codec: str) -> str:
    return f"{codec}_element_s"
