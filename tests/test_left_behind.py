"""Tests that leave something behind fail a run that names them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from left_behind import EXIT_CODE
from processes import TESTS, environment_of

pytestmark = pytest.mark.slow

CONFTEST = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import left_behind, pathlib

left_behind.NAMESPACES = pathlib.Path(__file__).with_name("namespaces")
left_behind.NAMESPACES.mkdir(exist_ok=True)

def pytest_configure(config):
    left_behind.own_temporary_folder(config)
    config.pluginmanager.register(left_behind.LeftBehind(descriptors=80))
"""
SUITE = """
import os, subprocess, tempfile, left_behind, pytest
kept = []

def test_nothing(tmp_path):
    with tempfile.TemporaryDirectory(), open(os.devnull):
        (tmp_path / "mine").touch()
        subprocess.run(["true"])
        kept.append(tempfile.TemporaryDirectory())  # removed at the end
        [os.close(each) for each in [os.dup(0) for _ in range(100)]]
"""
LEFT = {
    "a_process": ('kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))', "cat"),
    "one_that_ended": ('kept.append(os.posix_spawnp("true", ["true"], {}))', "it has ended"),
    "a_file": ("kept.append(tempfile.mkdtemp(prefix='mine-'))", "temporary files mine-"),
    "a_namespace": (
        'name = f"bed-{os.getpid()}-h0"; (left_behind.NAMESPACES / name).touch()',
        "the namespace bed-",
    ),
    "descriptors": ("kept.extend(os.pipe() for _ in range(50))", " pipe)"),
}
LAST = """
def test_last():
    pass
"""


def run(folder: Path, suite: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit code of a run of a file of tests, and its lines about what was left."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_suite.py").write_text(suite)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p xdist\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=environment_of({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    output = done.stdout + done.stderr
    start = output.find("left behind by tests")
    return done.returncode, output[start:].splitlines()[1:] if start >= 0 else []


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_a_run_that_leaves_nothing_passes(tmp_path: Path, arguments: list[str]) -> None:
    assert run(tmp_path, SUITE + LAST, *arguments) == (0, [])


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]], ids=["alone", "worker"])
@pytest.mark.parametrize("what", LEFT)
def test_what_a_test_leaves_fails_the_run(tmp_path: Path, what: str, arguments: list[str]) -> None:
    body, says = LEFT[what]
    suite = f"{SUITE}\ndef test_{what}():\n    {body}\n{LAST}"
    code, lines = run(tmp_path, suite, *arguments)
    assert code == EXIT_CODE
    (line,) = [line for line in lines if says in line]
    assert f"test_suite.py::test_{what}" in line
    assert not any("test_nothing" in line or "test_last" in line for line in lines), lines


def test_what_a_failed_test_leaves_is_not_said(tmp_path: Path) -> None:
    body, _ = LEFT["a_process"]
    suite = f"{SUITE}\ndef test_fails():\n    {body}\n    assert False\n{LAST}"
    assert run(tmp_path, suite) == (pytest.ExitCode.TESTS_FAILED, [])


def test_a_run_that_did_not_come_to_its_end_keeps_its_code(tmp_path: Path) -> None:
    body, _ = LEFT["a_process"]
    suite = f"{SUITE}\ndef test_ends():\n    {body}\n    pytest.exit('now')\n"
    code, _ = run(tmp_path, suite)
    assert code == pytest.ExitCode.INTERRUPTED
