"""Table of features by versions of torch, Lightning and Accelerate (`tests.campaigns.versions`)."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.harness.tables import Column, Row, Rows, Table, pivot

IMPORT = "import lightning_dist"
LOSSES = "losses"
"""Rows beside those of features."""


def _cell(row: Row) -> str:
    if row.get("error"):
        return row["error"] if row["feature"] == LOSSES else "fails"
    if row["feature"] == LOSSES:
        return "equal" if not row["differing"] else f"{row['difference']:.0e}"
    if row["missing"] is not None:
        return "no"
    if "tests" not in row:
        return "names"
    return f"{row['tests']:,} tests" + (f", {len(row['failed'])} fail" if row["failed"] else "")


def _columns(rows: Rows) -> list[Column]:
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [("feature", "{feature}"), *((kind.replace("==", " "), _cell, kind) for kind in kinds)]


def _lines(rows: Rows) -> Iterable[Row]:
    return pivot(rows, of=["feature"], by="kind")


FEATURES = Table(
    has="feature",
    columns=_columns,
    lines=_lines,
    text="Tests that ran with each version, all others as in the environment of the tests. names: "
    "all names that the feature uses are there. no: one is not. losses: of 4 steps with every "
    "codec on two ranks, the largest relative difference from those of the other tests.",
)
