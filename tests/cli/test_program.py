"""The installed program ``lightning-dist``, in processes of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from calls import program
from cli_saves import damage, save_file
from processes import run
from terminals import on_terminal

import lightning_dist

PROGRAM = Path(sys.executable).with_name("lightning-dist")

LOADED = """
import sys
import typer.testing
from lightning_dist.cli import app
for command in sys.argv[1:]:
    result = typer.testing.CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "lightning", "fsspec"}))
"""


def test_the_package_is_the_program_too() -> None:
    shown = run([sys.executable, "-m", "lightning_dist", "--version"], limit=60).require_success()
    assert lightning_dist.__version__ in shown.output


def test_the_program_ends_with_its_exit_codes_and_no_traceback(tmp_path: Path) -> None:
    save_file(tmp_path / "1.ckpt")
    damage(tmp_path / "1.ckpt")
    checked = run([PROGRAM, "ckpt", "verify", tmp_path], limit=60)
    assert checked.returncode == 1
    assert "data/0 has changed since it was written" in checked.output
    done = subprocess.run(
        [PROGRAM, "ckpt", "ls", tmp_path / "no"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"lightning-dist: There is no folder {tmp_path}/no; give the one that checkpoints are "
        "saved to (dirpath)\n"
    )


def test_prune_owns_the_folder_while_it_asks(tmp_path: Path) -> None:
    for step in (1, 2):
        save_file(tmp_path / f"{step}.ckpt", step=step)
    command = [PROGRAM, "ckpt", "prune", tmp_path, "--keep", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        said = b""
        while b"Remove 1 checkpoint?" not in said:
            part = asking.stdout.read(1)
            assert part, said
            said += part
        other = program("ckpt", "prune", tmp_path, "--keep", "1", "--yes")
        assert other.exit_code == 2
        assert f"process {asking.pid} on " in other.stderr
        assert (tmp_path / "1.ckpt").exists()
        asking.stdin.write(b"y\n")
        asking.stdin.close()
        assert asking.wait(60) == 0
    assert not (tmp_path / "1.ckpt").exists()


def test_what_is_read_shows_on_a_terminal_only(tmp_path: Path, quick_python: list[str]) -> None:
    path = save_file(tmp_path / "x.ckpt")
    done = on_terminal([*quick_python, "-m", "lightning_dist", "ckpt", "verify", path], piped=True)
    assert done.returncode == 0
    assert done.pipe.splitlines()[-1].startswith("ok ")
    assert f"reading {path}" in done.terminal
    piped = program("ckpt", "verify", path)
    assert (piped.exit_code, piped.stderr) == (0, "")


def test_the_program_itself_loads_no_torch(tmp_path: Path) -> None:
    save_file(tmp_path / "1.ckpt")
    commands = [
        "--version",
        "config --show",
        *(f"ckpt {c} {tmp_path}" for c in ("ls", "verify", "prune --keep=1")),
    ]
    assert run([sys.executable, "-c", LOADED, *commands], limit=60).require_success().output == "\n"


def test_that_test_can_fail(tmp_path: Path) -> None:
    code = "import fsspec\n" + LOADED
    loaded = run([sys.executable, "-c", code, "--version"], limit=60).require_success().output
    assert loaded == "fsspec\n"


def test_version() -> None:
    result = program("--version")
    assert result.exit_code == 0
    first, *others = result.stdout.splitlines()
    assert first == f"lightning-dist {lightning_dist.__version__}"
    found = dict(line.split(" ") for line in others)
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found["lightning"] == lightning.__version__


TOPK = [f"codec=topk:{name}=" for name in ("ratio", "block_size", "values", "decay")]
HIERARCHICAL = "\n".join(f"hierarchical={word}" for word in ("true", "false", "auto", "leader"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lightning-dist profile whatif --codec in", "int8\nint4"),
        ("lightning-dist profile whatif --codec d", "ddp\ndgc"),
        ("lightning-dist config --set st", "start_step="),
        ("lightning-dist config --set codec=to", "codec=topk"),
        ("lightning-dist config --set codec=topk:", "\n".join(TOPK)),
        ("lightning-dist config --set codec=topk:ratio=0.1,v", "codec=topk:ratio=0.1,values="),
        ("lightning-dist config --set commit=d", "commit=deferred"),
        ("lightning-dist config --set hierarchical=", HIERARCHICAL),
        ("lightning-dist config --set method=s", "method=streaming\nmethod=sparseloco"),
    ],
)
def test_completion(line: str, expected: str) -> None:
    words = {"_TYPER_COMPLETE_ARGS": line, "_LIGHTNING_DIST_COMPLETE": "complete_fish"}
    result = program(env={**words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    assert (result.exit_code, result.stdout.strip()) == (0, expected)


@pytest.mark.parametrize("arguments", [["--help"], ["ckpt", "--help"], ["ckpt", "prune", "--help"]])
def test_help(arguments: list[str]) -> None:
    result = program(*arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0
    expected = {1: ["ckpt"], 2: ["ls", "verify", "prune", "consolidate"], 3: ["--keep", "--yes"]}
    assert [word for word in expected[len(arguments)] if word not in result.stdout] == []


@pytest.mark.parametrize(
    "arguments", [["train"], ["ckpt", "rm"], ["ckpt", "ls"], ["--nope"]], ids=str
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = program(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.stderr
