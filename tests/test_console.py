"""What is printed where nobody has a terminal."""

from __future__ import annotations

import pty
import subprocess
import sys
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


def test_a_column_that_is_not_optional_is_folded_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    for name, value in (("COLUMNS", "30"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    with open(ours, "rb", buffering=0) as terminal, open(theirs, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        print_table(("a", "b", "c"), [("1" * 12, "2" * 25, "3" * 9)], optional=("c",))
        print("end", flush=True)
        text = b""
        while b"end" not in text:
            text += terminal.read(4096)
    header, *rows, end = text.decode().splitlines()
    assert (header.split(), end) == (["a", "b"], "end")
    assert "Columns left out for 30 columns: c (use" in " ".join(map(str.strip, rows))
    assert max(map(len, rows)) <= 30
    assert ("".join(rows).count("1"), "".join(rows).count("2")) == (12, 25)


def test_nobody_makes_another_one() -> None:
    package = Path(lightning_dist.__file__).parent
    found = subprocess.run(
        ["grep", "-rlE", "--include=*.py", r"stdout\.isatty|Console\(width", package],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [Path(each).name for each in found] == ["console.py"]
