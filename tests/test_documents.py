"""The tables in the documents are those of the kept results, and the names in them exist."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import lightning_dist
from benchmarks import docs_tables
from lightning_dist import CODECS
from lightning_dist.codecs.options import parse_codec

ROOT = Path(__file__).resolve().parents[1]


def test_the_measured_tables_are_made_from_the_kept_results() -> None:
    for document in docs_tables.DOCUMENTS:
        text = (ROOT / document).read_text()
        fresh = docs_tables.render(text, docs_tables.load_results(ROOT / "benchmarks/results"))
        assert fresh == text, f"{document} is not up to date: make tables"


SUMS = {"allreduce": "by the network", "two_shot": "decoded", "gather": "all payloads gathered"}


def test_the_table_of_the_guide_is_that_of_the_codecs() -> None:
    """Options with their defaults, what is kept, and who adds."""
    rows = [line for line in (ROOT / "docs/guide.md").read_text().splitlines() if "| " in line]
    for name, make in CODECS.items():
        if not make.__module__.startswith("lightning_dist."):
            continue
        (row,) = [r for r in rows if re.search(rf"^\|[^|]*`{name}`", r)]
        _, options, _, keeps, sums = (cell.strip() for cell in row.strip("|").split("|"))
        codec = make()
        said = dict(re.findall(r"`(\w+)=([^`]*)`", options))
        inherited = vars(CODECS["topk"]()) if "`topk`'s" in options else {}
        for option in vars(codec):
            if option in said or option not in inherited:
                assert parse_codec(f"{name}:{option}={said[option]}", CODECS) == codec, name
        kept = " and ".join(codec.memory().kinds) or "nothing"
        assert keeps.startswith(kept), name
        assert sums.startswith(SUMS[codec.exchange]), name


def test_every_codec_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs/api/codecs.md").read_text()
    own = [make for make in CODECS.values() if make.__module__.startswith("lightning_dist.")]
    assert [m.__name__ for m in own if f"::: lightning_dist.{m.__name__}\n" not in page] == []


def test_public_names_are_documented() -> None:
    documents = ("guide", "choosing-a-codec", "write-your-own-codec", "checkpoints", "profiling")
    files = ("README.md", *(f"docs/{name}.md" for name in documents))
    text = "".join((ROOT / file).read_text() for file in files)
    own = {"CODECS", "Codec", "__version__", *(make.__name__ for make in CODECS.values())}
    assert [n for n in lightning_dist.__all__ if n not in own and n not in text] == []


BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def own_names(tree: ast.Module) -> dict[str, Any]:
    """What a block imports from this package, by the name that it has in the block."""
    return {
        alias.asname or alias.name: getattr(import_module(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.partition(".")[0] == "lightning_dist"
        for alias in node.names
    }


def wrong_arguments(tree: ast.Module, names: dict[str, Any]) -> list[str]:
    """Calls with an argument that the function or class does not have."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        words = ast.unparse(node.func).removeprefix("lightning_dist.").split(".")
        called = names.get(words[0], getattr(lightning_dist, words[0], None))
        if len(words) > 1 or called is None:
            continue
        parameters = inspect.signature(called).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            continue
        known = {each.name for each in parameters}
        wrong += [f"{words[0]}({k.arg}=)" for k in node.keywords if k.arg not in {*known, None}]
    return wrong


@pytest.mark.parametrize("code", BLOCKS)
def test_code_uses_names_and_arguments_that_exist(code: str) -> None:
    tree = ast.parse(code)
    assert wrong_arguments(tree, own_names(tree)) == []


def test_that_test_can_fail() -> None:
    with pytest.raises(AttributeError):
        own_names(ast.parse("from lightning_dist import compress_dpp"))
    assert wrong_arguments(ast.parse("compress_ddp(model, codek='int8')"), {}) == [
        "compress_ddp(codek=)"
    ]
