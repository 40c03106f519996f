"""Packages that are missing: one line, with the command that installs them."""

import sys
from importlib import import_module

import pytest

from lightning_dist.base.optional import needed_by


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("plotly.graph_objects", "pip install 'lightning-dist[profile]'"),
        ("psutil", "pip install psutil"),
    ],
)
def test_the_command_is_said(module: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False) if package != module else None
    with pytest.raises(ImportError) as error, needed_by("This part"):
        import_module(module)
    assert str(error.value) == f"This part needs {package}, which is not installed: {command}"
    assert error.value.__suppress_context__


def test_a_module_of_ours_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lightning_dist\.nothing"), needed_by("This"):
        import_module("lightning_dist.nothing")
