"""What the documents say is in the code: names, metrics, messages, files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from lightning_dist.checkpoint.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "lightning_dist"
PAGES = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    *(ROOT / each / "README.md" for each in ("examples", "benchmarks/results")),
]
METRIC = re.compile(r"\b(?:comm|checkpoint|elastic)/[a-z]\w*\b")
OF_LOGGERS = [
    PACKAGE / "integrations" / "comm_report.py",
    PACKAGE / "checkpoint" / "metrics.py",
    PACKAGE / "elastic" / "history.py",
    *PACKAGE.rglob("live*.py"),
]


def strings(path: Path) -> Iterator[str]:
    """Every string of a module; what an f-string fills in is ``...``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(_text(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?[sdf]", "...", node.value)


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "..."


@cache
def metrics_of_the_code() -> frozenset[str]:
    """Full names, and what follows ``comm/`` where that is put before it."""
    of_checkpoints = {f"checkpoint/{field.name}" for field in fields(Metrics)}
    return of_checkpoints | frozenset(text for file in OF_LOGGERS for text in strings(file))


def is_logged(metric: str) -> bool:
    short = metric.removeprefix("comm/")
    return bool({metric, short, short.removeprefix("total_")} & metrics_of_the_code())


@pytest.mark.parametrize("module", ["lightning_dist", "lightning_dist.fabric"])
def test_every_public_name_is_on_a_page_of_the_api(module: str) -> None:
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    names = set(import_module(module).__all__) - {"CODECS", "__version__"}
    missing = [n for n in sorted(names) if not re.search(rf"^::: {module}\.{n}$", pages, re.M)]
    assert not missing, "add `::: NAME` to a page in docs/api/"


def test_accelerates_side_is_on_a_page_too() -> None:
    pytest.importorskip("accelerate")
    test_every_public_name_is_on_a_page_of_the_api("lightning_dist.accelerate")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)\s#]+)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_in_the_documents_are_logged(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", page.read_text())
    named = {metric for span in spans for metric in METRIC.findall(span) if span == metric}
    assert [metric for metric in sorted(named) if not is_logged(metric)] == []


def test_that_test_can_fail() -> None:
    assert is_logged("comm/exposed_fraction")
    assert is_logged("comm/total_wire_bytes")
    assert is_logged("elastic/restarts")
    assert not is_logged("comm/exposed")
    assert not is_logged("elastic/restart")


def test_messages_under_troubleshooting_are_ours() -> None:
    """The first span of a row is what is said, unless it is said by torch or the system."""
    said = [" ".join(text.split()) for file in PACKAGE.rglob("*.py") for text in strings(file)]
    said = [re.sub(r"(\.\.\.)+", "...", text) for text in said]
    rows = (DOCS / "troubleshooting.md").read_text().splitlines()
    messages = [found[1] for row in rows if (found := re.match(r"\| `([^`]*[a-z] [^`]*)` ", row))]
    ours = [message for message in messages if message != "Too many open files"]
    assert len(ours) > 6
    assert [
        m for m in ours if not any(m.removesuffix("...").strip() in text for text in said)
    ] == []


def panels_of_the_document() -> dict[str, tuple[str, ...]]:
    rows = (DOCS / "wandb.md").read_text().split("| panel |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {title: tuple(METRIC.findall(metrics)) for title, metrics, _ in cells}


def test_the_dashboard_has_the_panels_of_the_document() -> None:
    """Read from the source: wandb-workspaces takes seconds to import."""
    source = ast.parse((ROOT / "examples" / "wandb_dashboard.py").read_text())
    (sections,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "SECTIONS"
    )
    made = {title: of for panels in sections.values() for title, of in panels.items()}
    assert made == panels_of_the_document()


@pytest.mark.slow
def test_the_dashboard_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb_workspaces", reason="the example needs wandb-workspaces")
    monkeypatch.syspath_prepend(ROOT / "examples")
    workspace = import_module("wandb_dashboard").workspace("me", "tests")
    titles = [panel.title for section in workspace.sections for panel in section.panels]
    assert titles == list(panels_of_the_document())
