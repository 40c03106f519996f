"""The pieces of a page. One without data says why in a sentence, and shows nothing empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from lightning_dist.profiling.report.figure import Figure


@dataclass(frozen=True)
class Fact:
    """A figure that is read first. ``missing``: it was not measured, ``detail`` says why."""

    label: str
    value: str
    detail: str = ""
    missing: bool = False


@dataclass(frozen=True)
class Picture:
    """Something drawn, or the sentence ``missing``."""

    kind: ClassVar[str] = "picture"
    id: str
    title: str
    short: str
    caption: str = ""
    figure: Figure | None = None
    missing: str = ""


@dataclass(frozen=True)
class Column:
    """Of a table. Numbers are aligned to the right."""

    title: str
    unit: str = ""
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of text, or the sentence ``missing``."""

    kind: ClassVar[str] = "table"
    id: str
    title: str
    short: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Listing:
    """Sentences."""

    kind: ClassVar[str] = "listing"
    id: str
    title: str
    short: str
    lines: Sequence[str]
    missing: str = ""


View: TypeAlias = Picture | Table | Listing
