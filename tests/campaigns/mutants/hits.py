"""Blocks of the package that each test runs, in whatever processes: a pytest plugin.

`instrument` writes the bytecode of every module of a copy of the package anew, so that each block
notes that it has run; sources stay as they are. With ``-p tests.campaigns.mutants.hits`` each test,
and each fixture that several tests share, has a file of one byte for each block, and what each test
took is in ``seconds-*.jsonl``. A process that is killed has noted what it ran: the files are mapped
to memory.

In a copy of the repository, which is of no other use afterwards::

    python -m tests.campaigns.mutants.hits lightning_dist FOLDER
    HITS_FOLDER=FOLDER python -m pytest -p tests.campaigns.mutants.hits -n 3 --dist loadfile -m ""
"""

import ast
import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from importlib._bootstrap_external import _code_to_hash_pyc  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import pytest

RUNTIME = '''
import mmap, os

class _Unknown:
    """Until the test of this process is known."""
    def __setitem__(self, block, value):
        if "HITS_TEST" in os.environ:
            begin(os.environ["HITS_TEST"])
            buffer[block] = value

buffer = _Unknown()

def begin(test):
    global buffer
    if "HITS_FOLDER" not in os.environ:
        return
    with open(os.path.join(os.environ["HITS_FOLDER"], test), "a+b") as file:
        file.truncate({count})
        buffer = mmap.mmap(file.fileno(), {count})
'''
Place = tuple[str, int, int]
"""File of a block in the package, and its first and last line."""


class _Marking(ast.NodeTransformer):
    """Puts a statement at the begin of every block."""

    def __init__(self, file: str, places: list[Place]) -> None:
        self.file, self.places = file, places

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            return node
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(node, field, self._marked(node, block))
        return node

    def _marked(self, node: ast.AST, block: list[ast.stmt]) -> list[ast.stmt]:
        has_text = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None
        first, last = block[0], block[-1]
        source = f"_hits_.buffer[{len(self.places)}] = 1"
        self.places.append((self.file, first.lineno, last.end_lineno or last.lineno))
        mark = ast.copy_location(ast.parse(source).body[0], first)
        return [*block[:has_text], ast.fix_missing_locations(mark), *block[has_text:]]


def instrument(package: Path, folder: Path) -> None:
    """Write the bytecode of all modules, and the places of blocks to ``folder/places.json``."""
    places: list[Place] = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        tree = ast.parse(source)
        marking = _Marking(str(path.relative_to(package)), places)
        marked: Any = marking.visit(tree)
        start = sum(
            isinstance(node, ast.Expr) or getattr(node, "module", "") == "__future__"
            for node in marked.body[:2]
        )
        (load,) = ast.parse(f"import {package.name}._hits as _hits_").body
        marked.body.insert(start, load)
        code = compile(ast.fix_missing_locations(marked), str(path), "exec", dont_inherit=True)
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.parent.mkdir(exist_ok=True)
        # Without a check: the loader does not compare it with the source.
        digest = importlib.util.source_hash(source)
        cached.write_bytes(_code_to_hash_pyc(code, digest, checked=False))
    (package / "_hits.py").write_text(RUNTIME.format(count=len(places)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "places.json").write_text(json.dumps(places))


def name_of(test: str) -> str:
    return hashlib.sha1(test.encode()).hexdigest()[:20]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _begin(item.nodeid, fixtures=sorted(_shared(item)))
    began = time.monotonic()
    try:
        return (yield)
    finally:
        _note("seconds", item.nodeid, round(time.monotonic() - began, 3))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
    """What several tests share is run by all of them, not by the first one alone."""
    if fixturedef.scope == "function":
        return (yield)
    before = os.environ.get("HITS_TEST")
    _begin(_fixture(fixturedef))
    try:
        return (yield)
    finally:
        if before is not None:
            _continue(before)


def _fixture(fixturedef: Any) -> str:
    return f"fixture {fixturedef.baseid} {fixturedef.argname}"


def _shared(item: Any) -> Iterator[str]:
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        yield from (_fixture(each) for each in definitions if each.scope != "function")


def _begin(test: str, fixtures: list[str] | None = None) -> None:
    _note("names", name_of(test), test, fixtures or [])
    _continue(name_of(test))


def _note(kind: str, *row: object) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with open(f"{os.environ['HITS_FOLDER']}/{kind}-{worker}.jsonl", "a") as file:
        print(json.dumps(row), file=file)


def _noted(folder: Path, kind: str) -> Iterator[list[Any]]:
    for file in folder.glob(f"{kind}-*.jsonl"):
        yield from map(json.loads, file.read_text().splitlines())


def _continue(name: str) -> None:
    import lightning_dist._hits as hits  # type: ignore[import-not-found]

    os.environ["HITS_TEST"] = name
    hits.begin(name)


def tests_of_blocks(folder: Path) -> tuple[list[Place], list[set[str]]]:
    """Places of blocks, and the tests that run each."""
    places = [tuple(place) for place in json.loads((folder / "places.json").read_text())]
    known = {name: (test, fixtures) for name, test, fixtures in _noted(folder, "names")}
    ran: dict[str, set[int]] = {}
    for name, (test, _) in known.items():
        file = folder / name
        marks = file.read_bytes() if file.exists() else b""
        ran[test] = {block for block, mark in enumerate(marks) if mark}
    tests: list[set[str]] = [set() for _ in places]
    for test, fixtures in known.values():
        if not test.startswith("fixture "):
            for block in set().union(ran[test], *(ran.get(each, set()) for each in fixtures)):
                tests[block].add(test)
    return places, tests


def seconds_of_tests(folder: Path) -> dict[str, float]:
    return dict(map(tuple, _noted(folder, "seconds")))


if __name__ == "__main__":
    instrument(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
