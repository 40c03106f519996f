"""Tables of `tests.campaigns.versions`: features by versions, and what GPUs get of the kernels."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.harness.tables import Column, Row, Rows, Table, pivot
from lightning_dist.base.versions import release

IMPORT = "import lightning_dist"
LOSSES = "losses"
"""Rows beside those of features."""


PACKAGES = ("torch", "lightning", "accelerate")
"""In the order of columns."""


def _cell(row: Row) -> str:
    if row.get("error"):
        return row["error"] if row["feature"] == LOSSES else "fails"
    if row["feature"] == LOSSES:
        return "equal" if not row["differing"] else f"{row['difference']:.0e}"
    if row["missing"] is not None:
        return "no"
    if "tests" not in row:
        return "yes" if row["kind"].startswith("torch") else ""
    ran = row["tests"] - row["skipped"]
    if not ran:
        return "no"
    return f"{ran:,}" + (f", {len(row['failed'])} fail" if row["failed"] else "")


def _place(kind: str) -> tuple[int, tuple[int, ...]]:
    package, _, version = kind.partition("==")
    return PACKAGES.index(package), release(version)


def _columns(rows: Rows) -> list[Column]:
    kinds = sorted({row["kind"] for row in rows}, key=_place)
    return [("feature", "{feature}"), *((kind.replace("==", " "), _cell, kind) for kind in kinds)]


def _lines(rows: Rows) -> Iterable[Row]:
    return pivot(rows, of=["feature"], by="kind")


FEATURES = Table(
    has="feature",
    columns=_columns,
    lines=_lines,
    text="Tests of each feature that ran with each version, all other packages as in the "
    "environment of the tests. yes: the names that it uses are there. no: one is not, of it or of "
    "a feature that it needs. losses: of 4 steps with every codec on two ranks, beside those of "
    "the other tests.",
)


def _registers(row: Row) -> str:
    return f"{row['registers']}" + (f", {row['spilled']} B" if row["spilled"] else "")


def _register_columns(rows: Rows) -> list[Column]:
    targets = dict.fromkeys((row["kind"], row["architecture"]) for row in rows)
    named = [(f"Triton {kind.partition('==')[2]}, sm_{sm}", (kind, sm)) for kind, sm in targets]
    return [
        ("codec", "`{codec}`"),
        ("pass", "{pass}"),
        *((head, _registers, target) for head, target in named),
    ]


def _register_lines(rows: Rows) -> Iterable[Row]:
    targets = [{**row, "target": (row["kind"], row["architecture"])} for row in rows]
    return pivot(targets, of=["codec", "pass"], by="target")


REGISTERS = Table(
    has="registers",
    columns=_register_columns,
    lines=_register_lines,
    text="Registers of a thread, of 255 that there are, and bytes for what does not fit: kernels "
    "compiled without a GPU, for gradients in float32 whose addresses 16 divides, with error "
    "feedback.",
)
