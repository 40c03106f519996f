"""What holds for every command: help, JSON, completion, exit codes, quiet where nobody looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from cli_saves import damage, save_file
from terminals import on_terminal
from typer.testing import CliRunner

from lightning_dist import CODECS
from lightning_dist.cli import app

PROGRAM = [sys.executable, "-c", "from lightning_dist.cli import main; main()"]
COMMANDS = [
    *("bench", "codecs", "config", "doctor", "launch"),
    *(f"ckpt {name}" for name in ("ls", "verify", "prune", "consolidate")),
    *(f"profile {name}" for name in ("report", "compare", "whatif")),
]


def leaves(command: click.Command, path: str = "") -> list[str]:
    inner = getattr(command, "commands", {})
    return [x for name, each in inner.items() for x in leaves(each, f"{path} {name}")] or [path]


def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.stdout


def test_the_list_is_whole() -> None:
    assert sorted(path.strip() for path in leaves(typer.main.get_command(app))) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    lines = [line.strip(" │") for line in help_of(command).splitlines()]
    usage = [line for line in lines if line.startswith("Usage:")]
    assert len(usage) == 1
    assert [line for line in lines if f"lightning-dist {command}" in line and line not in usage]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "launch"])
def test_every_command_prints_json(command: str) -> None:
    (line,) = [line for line in help_of(command).splitlines() if "Print JSON, for pro" in line]
    assert "--json" in line.split()


def test_codecs_are_the_table_of_the_package() -> None:
    result = CliRunner().invoke(app, ["codecs", "--json"])
    rows = {row["name"]: row for row in json.loads(result.stdout)["codecs"]}
    assert list(rows) == list(CODECS)
    assert [name for name, row in rows.items() if not row["use"]] == []
    assert len({row["use"] for row in rows.values()}) == len(rows)
    assert rows["int8"]["options"] == {"block_size": 256}
    assert rows["int8"]["bytes_per_element"] == pytest.approx(1 + 2 / 256)
    assert (rows["none"]["bytes_per_element"], rows["none"]["keeps_residual"]) == (4, False)
    assert rows["powersgd"]["bytes_per_element"] is None
    assert rows["topk"]["keeps_residual"]
    table = CliRunner().invoke(app, ["codecs"]).stdout.splitlines()
    assert [line.split()[0] for line in table[1 : len(CODECS) + 1]] == list(CODECS)


def test_prune_for_programs(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_file(tmp_path / f"{step}.ckpt", step=step)
    damage(tmp_path / "3.ckpt")
    words = ["ckpt", "prune", str(tmp_path), "--keep", "1", "--json"]
    refused = CliRunner().invoke(app, words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--json cannot ask before it removes: add --yes, or --dry-run" in refused.stderr
    dry = json.loads(CliRunner().invoke(app, [*words, "--dry-run"]).stdout)
    assert (dry["dry_run"], len(list(tmp_path.glob("*.ckpt")))) == (True, 3)
    content = json.loads(CliRunner().invoke(app, [*words, "--yes"]).stdout)
    assert {**dry, "dry_run": False} == content
    assert content["kept"] == [{"path": str(tmp_path / "2.ckpt"), "why": None}]
    removed = {Path(each["path"]).name: each["why"] for each in content["removed"]}
    assert removed["1.ckpt"] == "older"
    assert "has changed since it was written" in removed["3.ckpt"]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["2.ckpt"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    environ = {**os.environ, "_LIGHTNING_DIST_COMPLETE": f"source_{shell}"}
    script = subprocess.run(PROGRAM, env=environ, capture_output=True, text=True, timeout=60)
    assert script.returncode == 0, script.stderr
    assert "lightning-dist" in script.stdout
    environ |= {
        "_LIGHTNING_DIST_COMPLETE": f"complete_{shell}",
        **{"COMP_WORDS": "lightning-dist co", "COMP_CWORD": "1"},  # bash
        **{"_TYPER_COMPLETE_ARGS": "lightning-dist co", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    found = subprocess.run(PROGRAM, env=environ, capture_output=True, text=True, timeout=60)
    assert "codecs" in found.stdout
    assert "config" in found.stdout
    assert "doctor" not in found.stdout


COLORS = ("\x1b[3", "\x1b[9")


def test_no_color_is_respected(tmp_path: Path) -> None:
    save_file(tmp_path / "1.ckpt")
    words = [*PROGRAM, "ckpt", "verify", tmp_path / "1.ckpt"]
    colored, plain = on_terminal(words).terminal, on_terminal(words, NO_COLOR="1").terminal
    assert any(code in colored for code in COLORS)
    assert not any(code in plain for code in COLORS), plain
    assert "ok " in plain


def test_without_a_terminal_there_are_no_codes_and_no_bars(tmp_path: Path) -> None:
    save_file(tmp_path / "1.ckpt")
    for words in (["ckpt", "verify", tmp_path], ["ckpt", "ls", tmp_path], ["--help"]):
        done = subprocess.run([*PROGRAM, *words], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\x1b" not in done.stdout
        assert b"\r" not in done.stdout


NEXT = "the next command"
IN_TURN = f"""
import sys
from lightning_dist.cli import main
for words in sys.argv[1:]:
    sys.argv = ["lightning-dist", *words.split()]
    try:
        main()
    except SystemExit:
        print({NEXT!r}, flush=True)
"""


def test_boxes_are_for_terminals() -> None:
    """In a file, a log or a pager, and where no decoration is wanted, text is plain."""
    commands = ["--help", "ckpt prune --help", "bench --nope"]
    program = [sys.executable, "-c", IN_TURN, *commands]
    piped = subprocess.run(
        program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )

    def of_each(said: str) -> list[str]:
        assert said.count(NEXT) == len(commands)
        return said.split(NEXT)[:-1]

    for plain in of_each(piped.stdout):
        assert "Usage: lightning-dist" in plain
    for boxed in of_each(on_terminal(program).terminal):
        assert "╭" in boxed
    for others in (
        piped.stdout,
        on_terminal(program, NO_COLOR="1").terminal,
        on_terminal(program, piped=True).pipe,
    ):
        assert not set("╭│\x1b") & set(others), others


def test_a_status_is_for_terminals(tmp_path: Path) -> None:
    """What doctor says while it works is not in the log of a job."""
    done = subprocess.run([*PROGRAM, "doctor", "--json"], capture_output=True, timeout=100)
    assert done.returncode in (0, 1)
    assert json.loads(done.stdout)["findings"]
    assert done.stderr == b""
