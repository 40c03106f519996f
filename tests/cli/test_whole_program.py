"""What holds for every command: help, JSON, completion, exit codes, quiet where nobody looks.

Also of the installed program ``lightning-dist``, in processes of its own.
"""

import json
import os
import platform
import pty
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import lightning
import pytest
from calls import LOADED, commands, program, save
from cli_saves import damage, save_file
from planted import Planted
from processes import readable, run

import lightning_dist
from lightning_dist import CODECS
from lightning_dist.cli import main


@dataclass(frozen=True)
class Shown:
    """What a program has left: on the terminal, and in the pipe if its standard output was one."""

    returncode: int
    terminal: str
    pipe: str


def on_terminal(
    command: Sequence[str | Path], *, piped: bool = False, limit: float = 60, **environ: str
) -> Shown:
    """Run a program whose standard error, and output unless ``piped``, is a terminal.

    limit: seconds of silence after which it is taken for hanging.
    """
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE if piped else theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "200", **environ},
    ) as job:
        os.close(theirs)
        said = b""
        try:
            while readable(ours, limit):  # while it runs: a terminal holds little
                said += os.read(ours, 1 << 16)
            job.kill()
        except OSError:  # how the end of a terminal is read
            pass
        finally:
            os.close(ours)
        pipe = job.stdout.read().decode() if job.stdout else ""
    return Shown(job.returncode, said.decode(), pipe)


PROGRAM = Path(sys.executable).with_name("lightning-dist")
PATHS = [*commands()]
GROUPS = {path[:-1] for path in PATHS if path}
COMMANDS = [" ".join(path) for path in PATHS if path not in GROUPS]


def help_of(command: str) -> str:
    result = program(*command.split(), "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.stdout


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
    result = program("codecs", "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)["codecs"]}
    assert list(rows) == list(CODECS)
    assert [name for name, row in rows.items() if not row["use"]] == []
    assert len({row["use"] for row in rows.values()}) == len(rows)
    assert rows["int8"]["options"] == {"block_size": 256}
    assert rows["int8"]["bytes_per_element"] == pytest.approx(1 + 2 / 256)
    assert (rows["none"]["bytes_per_element"], rows["none"]["keeps_residual"]) == (4, False)
    assert rows["powersgd"]["bytes_per_element"] == 4 * 4 / 1024
    assert rows["threshold"]["bytes_per_element"] is None
    assert rows["topk"]["keeps_residual"]
    table = program("codecs").stdout.splitlines()
    assert [line.split()[0] for line in table[1 : len(CODECS) + 1]] == list(CODECS)


def test_prune_for_programs(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_file(tmp_path / f"{step}.ckpt", step=step)
    damage(tmp_path / "3.ckpt")
    words = ["ckpt", "prune", str(tmp_path), "--keep", "1", "--json"]
    refused = program(*words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--json cannot ask for confirmation: add --yes, or --dry-run" in refused.stderr
    dry = json.loads(program(*words, "--dry-run").stdout)
    assert (dry["dry_run"], len(list(tmp_path.glob("*.ckpt")))) == (True, 3)
    content = json.loads(program(*words, "--yes").stdout)
    assert {**dry, "dry_run": False} == content
    assert content["kept"] == [{"path": str(tmp_path / "2.ckpt"), "why": None}]
    assert content["removed"] == [{"path": str(tmp_path / "1.ckpt"), "why": "older"}]
    (damaged,) = content["untouched"]
    assert "has changed since it was written" in damaged["why"]
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"2.ckpt", "3.ckpt"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_in_every_shell(shell: str) -> None:
    def complete(instruction: str, **environ: str) -> str:
        environ |= {"_LIGHTNING_DIST_COMPLETE": f"{instruction}_{shell}"}
        return program(env=environ, prog_name="lightning-dist").stdout

    assert "lightning-dist" in complete("source")
    found = complete(
        "complete",
        **{"COMP_WORDS": "lightning-dist co", "COMP_CWORD": "1"},  # bash
        **{"_TYPER_COMPLETE_ARGS": "lightning-dist co", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    )
    assert "codecs" in found
    assert "config" in found
    assert "doctor" not in found


COLORS = ("\x1b[1m", "\x1b[1;", "\x1b[3", "\x1b[9")


@pytest.fixture(scope="module")
def command(quick_python: list[str]) -> list[str]:
    return [*quick_python, "-c", "from lightning_dist.cli import main; main()"]


def test_terminals_have_colors_and_boxes(tmp_path: Path, command: list[str]) -> None:
    """In a file, a log or a pager, and where no decoration is wanted, text is plain."""
    save_file(tmp_path / "1.ckpt")
    verify = [*command, "ckpt", "verify", tmp_path / "1.ckpt"]
    for arguments in ([*command, "codecs"], verify):
        colored = on_terminal(arguments).terminal
        plain = on_terminal(arguments, NO_COLOR="1").terminal
        assert any(code in colored for code in COLORS)
        assert not any(code in plain for code in COLORS), plain
    assert "ok " in plain
    show = [*command, "ckpt", "prune", "--help"]
    for text in (on_terminal(show).terminal, on_terminal(show, piped=True).pipe):
        assert "Usage: lightning-dist" in text
        assert not set("╭│\x1b") & set(text), text


TABLES = """
import sys
from lightning_dist.cli import app
from lightning_dist.cli.bench import print_report
from lightning_dist.cli.bench_run import Report
from lightning_dist.cli.doctor import Finding
from lightning_dist.cli.doctor import show
from lightning_dist.profiling.links import Measurement
for words in sys.argv[1:]:
    app(words.split(), standalone_mode=False)
show({"gloo address": Finding("warning", "10.0.0.1 " * 20, "a fix")}, as_json=False)
nodes = [f"node{rank}" for rank in range(12)]
rows = [Measurement("all_gather", 1 << 26, 12, (0.25, 0.5))]
print_report(Report(nodes, range(12), "flat", "gloo", "cpu", rows))
rates = [[None if a == b else 0.9 for b in nodes] for a in nodes]
print_report(Report(nodes, range(12), "flat", "gloo", "cpu", (), 1 << 20, rates))
"""


def test_tables_fit_80_columns_or_name_the_columns_left_out(
    tmp_path: Path, quick_python: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "cache")
    save_file(f"ckpts/a-checkpoint-with-a-long-name-epoch=3-step={10**9}.ckpt", step=10**9)
    save(Path("run"), Planted(steps=8, codec="ddp", encode=0, decode=0).run())
    commands = [
        *("codecs", "config --show", "ckpt ls ckpts", "profile report run --no-html"),
        *("profile compare run run", "profile whatif run --codec ddp"),
    ]
    command = [*quick_python, "-c", TABLES, *commands]
    shown = on_terminal(command, COLUMNS="80", NO_COLOR="1")
    lines = shown.terminal.splitlines()
    assert shown.returncode == 0, shown.terminal
    assert [line for line in lines if len(line) > 80] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.terminal
    left_out = [line for line in lines if line.startswith("Columns left out for 80 columns: ")]
    assert len(left_out) == 3, left_out
    wide = on_terminal(command, piped=True, COLUMNS="80").pipe
    assert "Columns left out" not in wide


@pytest.mark.parametrize("words", ["--help", "ckpt prune --help", "bench --nope"])
def test_help_is_plain_text(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose paragraphs are filled, and which has no boxes."""
    monkeypatch.setattr(sys, "argv", ["lightning-dist", *words.split()])
    with pytest.raises(SystemExit):
        main()
    text = "".join(capsys.readouterr())
    assert "Usage: lightning-dist" in text
    assert not set("╭│\x1b") & set(text)


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


def test_version() -> None:
    result = program("--version")
    assert result.exit_code == 0
    above, _, features = result.stdout.partition("\n\n")
    first, *others = above.splitlines()
    assert first == f"lightning-dist {lightning_dist.__version__}"
    found = dict(line.split(" ") for line in others)
    assert found["torch"] == version("torch")
    assert found["python"] == platform.python_version()
    assert found["lightning"] == lightning.__version__
    assert "FSDP2: available" in features.splitlines()


TOPK = [f"codec=topk:{name}=" for name in ("ratio", "block_size", "values", "decay")]
HIERARCHICAL = "\n".join(f"hierarchical={word}" for word in ("true", "false", "auto", "leader"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lightning-dist profile whatif --codec in", "int8\nint4"),
        ("lightning-dist profile whatif --codec d", "ddp\ndgc"),
        ("lightning-dist config --set sta", "start_step=\nstate_update="),
        ("lightning-dist config --set codec=to", "codec=topk"),
        ("lightning-dist config --set codec=topk:", "\n".join(TOPK)),
        ("lightning-dist config --set codec=topk:ratio=0.1,v", "codec=topk:ratio=0.1,values="),
        ("lightning-dist config --set state_update=d", "state_update=deferred"),
        ("lightning-dist config --set hierarchical=", HIERARCHICAL),
        ("lightning-dist config --set method=s", "method=streaming\nmethod=sparseloco"),
    ],
)
def test_completion(line: str, expected: str) -> None:
    words = {"_TYPER_COMPLETE_ARGS": line, "_LIGHTNING_DIST_COMPLETE": "complete_fish"}
    result = program(env={**words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    assert (result.exit_code, result.stdout.strip()) == (0, expected)


@pytest.mark.parametrize(
    "arguments", [["train"], ["ckpt", "rm"], ["ckpt", "ls"], ["--nope"]], ids=str
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = program(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.stderr
