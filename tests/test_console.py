"""What is printed where nobody has a terminal."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import lightning_dist
from lightning_dist.console import print_table, stdout_console


def test_without_a_terminal_a_line_stays_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    line = "12 words " * 200
    stdout_console().print(line)
    assert capsys.readouterr().out == f"{line}\n", "neither folded nor coloured"


def test_a_table_has_no_frame_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "MB"), [("[red]x", "1"), ("y", "10 words " * 50)], right=("MB",))
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["a", "MB"]
    assert rows[0].split() == ["[red]x", "1"]
    assert rows[0].endswith("1")  # aligned to the right
    assert len(rows) == 2


def test_nobody_makes_another_one() -> None:
    package = Path(lightning_dist.__file__).parent
    found = subprocess.run(
        ["grep", "-rlE", "--include=*.py", r"stdout\.isatty|Console\(width", package],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [Path(each).name for each in found] == ["console.py"]
