"""Failed tests of a run are repeated once, alone, and the run says so in its last lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import TESTS, environment_of

pytestmark = pytest.mark.slow

SUITE = """
import os, pathlib, pytest

def fails(name, times, end=None):
    path = pathlib.Path(__file__).with_name(name)
    before = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (before + 1))
    if before < times and end is not None:
        os._exit(end)
    assert before >= times, f"failure {before + 1} of {name}"

def test_passes():
    fails("passes", 0)
"""
BY_CHANCE = """
@pytest.mark.parametrize("case", ["a b", "c"])
def test_by_chance(case):
    fails(case, 1)
"""
TWICE = """
def test_wrong():
    fails("wrong", 2)
"""
TORN_DOWN = """
@pytest.fixture
def left():
    yield
    fails("left", 2)

def test_torn_down(left):
    pass
"""
ENDED = """
def test_ended():
    fails("ended", 2, 1)
"""

CONFTEST = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from left_behind import LeftBehind

def pytest_configure(config):
    config.pluginmanager.register(LeftBehind())
"""
LEFT = """
import subprocess
kept = []

def test_left():
    path = pathlib.Path(__file__).with_name("again")
    if not path.exists():
        path.touch() if {by_chance} else None
        kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
"""


def lines_of(folder: Path, suite: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and output of a run of a file of tests."""
    (folder / "test_suite.py").write_text(suite)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p xdist\n")
    command = [sys.executable, "-m", "tests.rerun_failed", "out", *arguments]
    environment = environment_of({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_run_without_a_failure_repeats_nothing(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE)
    assert code == 0
    assert lines[-1].startswith("1 passed")
    assert (tmp_path / "passes").read_text() == "x"


def test_what_passes_when_it_is_repeated_is_named_and_the_run_passes(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + BY_CHANCE)
    assert code == 0
    assert [line for line in lines[-4:] if line.startswith("FLAKY")] == [
        "FLAKY test_suite.py::test_by_chance[a b]",
        "FLAKY test_suite.py::test_by_chance[c]",
    ]
    assert (tmp_path / "passes").read_text() == "x"  # what has passed is not repeated
    kept = [file.read_text() for file in sorted((tmp_path / "out").glob("[!s]*.txt"))]
    assert ["failure 1 of c" in text for text in kept] == [True, False]
    assert ["2 passed" in text for text in kept] == [False, True]


@pytest.mark.parametrize("suite", [TWICE, TORN_DOWN, ENDED], ids=["call", "teardown", "process"])
def test_what_fails_twice_fails_the_run_and_says_how_to_repeat_it(
    tmp_path: Path, suite: str
) -> None:
    name = suite.partition("def test_")[2].partition("(")[0]
    code, lines = lines_of(tmp_path, SUITE + suite, "-n", "1")
    assert code == 1
    assert lines[-2] == f"FAILED test_suite.py::test_{name}"
    assert lines[-1].endswith(f'/bin/python -m pytest -m "" test_suite.py::test_{name}')
    assert (tmp_path / "out/summary.txt").read_text().splitlines() == lines[-2:]
    assert (tmp_path / "passes").read_text() == "x"


def test_one_of_two_that_fail_twice(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + BY_CHANCE + TWICE)
    assert code == 1
    kinds = [line.partition(" ")[0] for line in lines[-6:]]
    assert [kind for kind in kinds if kind] == ["FLAKY", "FLAKY", "FAILED"]


def test_a_run_that_pytest_could_not_finish_fails(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + "raise RuntimeError('at import')\n")
    assert code == pytest.ExitCode.INTERRUPTED
    assert not any("once more" in line for line in lines)
    code, _ = lines_of(tmp_path, SUITE, "-k", "nothing")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_file_that_a_worker_cannot_import_fails_twice(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + "raise RuntimeError('at import')\n", "-n", "1")
    assert code == 1
    assert lines[-2] == "FAILED test_suite.py"


@pytest.mark.parametrize("by_chance", [True, False])
def test_what_leaves_something_behind_has_failed(tmp_path: Path, by_chance: bool) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    code, lines = lines_of(tmp_path, SUITE + TWICE + LEFT.format(by_chance=by_chance))
    assert code == 1
    kind = "FLAKY" if by_chance else "FAILED"
    assert [line for line in lines[-4:] if line.startswith(("F", "f"))] == [
        f"{kind} test_suite.py::test_left",
        "FAILED test_suite.py::test_wrong",
    ]
