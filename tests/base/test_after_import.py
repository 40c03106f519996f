"""Calls that wait for an import."""

import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from lightning_dist.base.optional import after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module that was not imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "waited_for", ModuleType("waited_for"))
    del sys.modules["waited_for"]  # again at the end
    file = tmp_path / "waited_for.py"
    file.write_text("NUMBER = 3\n")
    return file


def test_it_comes_once_and_leaves_the_module_as_it_is(module: Path) -> None:
    known, seen = [*sys.meta_path], list[ModuleType]()
    after_import("waited_for", seen.append)
    assert seen == []
    found = import_module("waited_for")
    import_module("waited_for")
    assert seen == [found]
    assert found.NUMBER == 3
    assert sys.meta_path == known
    assert inspect.getsource(found) == "NUMBER = 3\n"
    assert type(found.__loader__).__name__ == "SourceFileLoader"
    assert found.__spec__ is not None
    assert found.__spec__.loader is found.__loader__


def test_a_module_that_is_there_is_not_waited_for(module: Path) -> None:
    found, seen = import_module("waited_for"), list[ModuleType]()
    after_import("waited_for", seen.append)
    assert seen == [found]


def test_several_calls_wait_for_one_module(module: Path) -> None:
    seen: list[str] = []
    after_import("waited_for", lambda _: seen.append("first"))
    after_import("waited_for", lambda _: seen.append("second"))
    import_module("waited_for")
    assert sorted(seen) == ["first", "second"]


def test_an_import_that_fails_is_waited_for_again(module: Path) -> None:
    seen: list[ModuleType] = []
    after_import("waited_for", seen.append)
    module.write_text("import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        import_module("waited_for")
    module.write_text("NUMBER = 4  # of another length\n")
    assert import_module("waited_for").NUMBER == 4
    assert [each.NUMBER for each in seen] == [4]


def test_a_module_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    after_import("no_such_module_at_all", print)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        import_module("no_such_module_at_all")
