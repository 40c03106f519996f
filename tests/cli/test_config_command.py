"""``lightning-dist config``: what it asks, what it writes, what it shows."""

import json
import os
import pty
import subprocess
import termios
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from calls import program, refusal
from click.testing import Result
from processes import readable

from lightning_dist.cli import config_accelerate
from lightning_dist.settings import OPTIONS, read
from lightning_dist.settings.declared import settings_of
from lightning_dist.settings.exchange import ExchangeSettings

config_command = import_module("lightning_dist.cli.config")

HIDDEN = "\x1b[?25l"
"""What Accelerate's menus end with: the cursor is hidden, an arrow shows the choice."""
DEFAULTS = {name: each.default for name, each in settings_of(ExchangeSettings).items()}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Accelerate's folder, empty."""
    for name in [name for name in os.environ if name.startswith("LIGHTNING_DIST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "accelerate"


def invoke(*words: str | Path) -> Result:
    return program("config", *words)


def done(*words: str | Path) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return tmp_path / "two.yaml"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return tmp_path / "lightning_dist.yaml"


def test_defaults_are_both_files(theirs: Path, ours: Path) -> None:
    shown = done("--defaults", "--config_file", theirs)
    assert shown.splitlines() == [f"written: {theirs}", f"written: {ours}"]
    assert read(ours) == DEFAULTS
    content = yaml.safe_load(theirs.read_text())
    assert (content["compute_environment"], content["num_machines"]) == ("LOCAL_MACHINE", 1)


def test_accelerate_reads_its_file(theirs: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    done("--set", "accelerate.mixed_precision=no", "--defaults", "--config_file", theirs)
    assert load_config_from_file(str(theirs)).mixed_precision == "no"


def test_set_changes_what_it_names_and_only_that_file(theirs: Path, ours: Path) -> None:
    done("--defaults", "--set", "start_step=5", "--config_file", theirs)
    theirs.write_text(f"# mine\n{theirs.read_text()}")
    assert done("--set", "codec=int4", "--config_file", theirs) == f"written: {ours}\n"
    assert read(ours) == {**DEFAULTS, "start_step": 5, "codec": "int4"}
    assert theirs.read_text().startswith("# mine\n")
    shown = done("--set", "accelerate.num_processes=3", "--config-file", theirs)
    assert shown == f"written: {theirs}\n"
    assert read(ours)["codec"] == "int4"
    assert yaml.safe_load(theirs.read_text())["num_processes"] == 3


def test_set_without_files_writes_that_and_what_accelerate_needs(theirs: Path, ours: Path) -> None:
    done("--set", "codec=topk:ratio=0.05", "--set", "ranks_per_node=2", "--config_file", theirs)
    assert read(ours) == {"codec": "topk:ratio=0.05", "ranks_per_node": 2}
    assert "distributed_type" in yaml.safe_load(theirs.read_text())


def test_local_updates_have_the_codec_of_their_method(theirs: Path, ours: Path) -> None:
    done("--defaults", "--set", "method=sparseloco", "--config_file", theirs)
    sparse = "topk:ratio=0.015625,values=int2,decay=0.95"
    assert read(ours) == {**DEFAULTS, "codec": sparse, "method": "sparseloco"}
    done("--set", "method=diloco", "--set", "sync_every=16", "--config_file", theirs)
    assert read(ours) == {**DEFAULTS, "method": "diloco", "sync_every": 16}


def test_codecs_that_local_updates_do_not_take(theirs: Path) -> None:
    words = ("--set", "method=diloco", "--set", "codec=dgc", "--config_file", theirs)
    assert "a pseudo-gradient is a difference of weights" in refusal("config", *words)


def test_several_processes_are_no_single_one(theirs: Path) -> None:
    words = ("--set", "accelerate.num_processes=2", "--set", "accelerate.use_cpu=true")
    result = invoke("--defaults", *words, "--config_file", theirs)
    assert yaml.safe_load(theirs.read_text())["distributed_type"] == "MULTI_CPU"
    assert "would start one process" in result.stderr


def test_json_says_what_was_written(theirs: Path, ours: Path) -> None:
    content = json.loads(done("--defaults", "--json", "--config_file", theirs))
    assert content == {"written": [str(theirs), str(ours)], "options": DEFAULTS}


def test_show_says_where_everything_comes_from(
    folder: Path, theirs: Path, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("--set", "codec=int4", "--set", "start_step=7")
    done("--set", "codec=sign", "--config_file", theirs)
    monkeypatch.setenv("LIGHTNING_DIST_ERROR_FEEDBACK", "false")
    here = json.loads(done("--show", "--json"))
    beside = str(folder / "lightning_dist.yaml")
    assert here["options"]["codec"] == {"value": "int4", "from": beside}
    assert here["options"]["hierarchical"] == {"value": "auto", "from": "default"}
    variable = {"value": False, "from": "LIGHTNING_DIST_ERROR_FEEDBACK"}
    assert here["options"]["error_feedback"] == variable
    assert here["accelerate"] == str(folder / "default_config.yaml")
    launched = json.loads(done("--show", "--json", "--config_file", theirs))
    assert launched["options"]["codec"] == {"value": "sign", "from": str(ours)}
    assert launched["options"]["start_step"] == {"value": 7, "from": beside}
    table = done("--show").splitlines()
    assert table[1].split() == ["codec", "int4", beside]
    assert len(table) == 2 + len(OPTIONS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "Questions need a terminal: add --defaults, or --set KEY=VALUE"),
        ("--set codec", "--set must be KEY=VALUE, such as codec=int8; got 'codec'"),
        ("--set codek=int8", "Unknown setting 'codek' in --set: did you mean 'codec'?"),
        ("--set codec=int3", "codec must be one of 'none'"),
        ("--set codec=int8 --set codec=int4", "--set codec is given twice"),
        ("--set codec=qsgd --set error_feedback=true", "Error feedback diverges"),
        ("--set start_step=-1", "start_step must be 0 or more"),
        ("--set method=dilocco", "method must be local_sgd, post_local_sgd, diloco"),
        (
            "--set sync_every=8",
            "cannot take effect under DDP, got 8; give method=",
        ),
        ("--set method=diloco --set start_step=5", "cannot take effect under local updates, got 5"),
        ("--set method=diloco --set overlap_steps=40", "less than sync_every / fragments"),
        ("--set accelerate.num_proceses=2", "did you mean 'num_processes'?"),
        ("--set accelerate.num_processes=two", "accelerate.num_processes must be int, got 'two'"),
        ("--set accelerate.num_processes=true", "must be int, got True"),
        ("--set accelerate.distributed_type=GPUS", "must be one of NO, MULTI_CPU"),
        ("--set accelerate.mixed_precision=fp7", "must be one of no, fp8, fp16, bf16"),
        ("--show --defaults", "--show writes nothing"),
    ],
)
def test_bad_input_writes_nothing(folder: Path, words: str, said: str) -> None:
    result = invoke(*words.split())
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("lightning-dist:")]
    assert said in line
    assert not folder.exists()


def test_a_file_that_is_wrong_stays_as_it_is(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("lightning_dist: {}\ndistributed_type: 'NO'\n")
    said = refusal("config", "--set", "accelerate.num_processes=2")
    assert "had unknown keys (['lightning_dist'])" in said
    assert not (folder / "lightning_dist.yaml").exists()


FSDP2 = ("accelerate.distributed_type=FSDP", "accelerate.fsdp_config={fsdp_version: 2}")


def asked(theirs: Path, answers: str, patch: pytest.MonkeyPatch, ask: Callable[[], object]) -> str:
    """What the program says on a terminal where Accelerate's questions are answered by ``ask``."""
    patch.setattr(config_accelerate, "ask", ask)
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    patch.setattr(config_command, "sys", terminal)
    result = program("config", "--config_file", theirs, input=answers)
    assert result.exit_code == 0, result.output
    return result.output


def test_under_fsdp2_only_what_takes_effect_is_asked(
    theirs: Path, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.write_text("codec: sign\nhierarchical: true\nrank_groups: [[0, 1], [2, 3]]\n")
    answers = config_accelerate.defaults()
    config_accelerate.change(answers, {"distributed_type": "FSDP"})
    answers.fsdp_config = {"fsdp_version": 2}
    said = asked(theirs, "int9\nint8\nqsgd\n\n1000\n\n\n\n", monkeypatch, lambda: answers)
    assert "codec must be one of" in said
    expected = {"codec": "qsgd", "error_feedback": "auto", "min_compress_numel": 1000}
    expected |= {"start_step": 0, "compile_kernels": "auto", "state_update": "auto"}
    assert read(ours) == {**expected, "parameters": "int8"}
    assert yaml.safe_load(theirs.read_text())["fsdp_config"] == {"fsdp_version": 2}


def test_with_a_method_the_questions_are_those_of_local_updates(
    theirs: Path, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.write_text("codec: sign\nstart_step: 7\nmixing: 0.25\n")
    answers = "dilocco\ndiloco\n16\n\n\n\n\n\n\n\n\n"
    said = asked(theirs, answers, monkeypatch, config_accelerate.defaults)
    assert "method must be local_sgd" in said
    assert "The codec of what is sent" in said
    found = {name: value for name, value in read(ours).items() if value is not None}
    local = {"method": "diloco", "sync_every": 16, "mixing": 0.25}
    assert found == {**local, "codec": "int8", "error_feedback": "auto", "hierarchical": "auto"}


def test_under_fsdp2_settings_of_ddp_are_refused(theirs: Path, ours: Path) -> None:
    words = [word for each in FSDP2 for word in ("--set", each)]
    said = refusal("config", "--set", "hierarchical=true", *words, "--config_file", theirs)
    assert "hierarchical is a setting of DDP and cannot take effect under FSDP2" in said
    levels = "codec={intra: bf16, inter: int4}"
    said = refusal("config", "--set", levels, *words, "--config_file", theirs)
    assert "Inside a replica FSDP reduces gradients itself" in said
    assert not theirs.exists()
    done("--defaults", "--set", "codec=int4", *words, "--config_file", theirs)
    assert read(ours) == {**DEFAULTS, "codec": "int4"}
    assert yaml.safe_load(theirs.read_text())["distributed_type"] == "FSDP"


def test_codecs_of_parameters_and_of_gradients_must_fit(theirs: Path, ours: Path) -> None:
    words = ["--set", "parameters=int8", "--config_file", theirs]
    assert "is biased" in refusal("config", "--set", "codec=int8", *words)
    done("--set", "codec=qsgd:bits=8", *words)
    assert read(ours) == {"codec": "qsgd:bits=8", "parameters": "int8"}


def test_the_questions_on_a_terminal(folder: Path, quick_python: list[str]) -> None:
    """Accelerate's are answered with Enter, until the first of ours is there."""
    answers = [("The codec", "int9"), ("The codec", "topk:ratio=0.05"), ("Steps before", "100")]
    said = _answered([*quick_python, "-m", "lightning_dist", "config"], answers, limit=60)
    assert "codec must be one of" in said
    ours = read(folder / "lightning_dist.yaml")
    assert ours["codec"] == "topk:ratio=0.05"
    assert ours["start_step"] == 100
    assert ours["hierarchical"] == "auto"
    assert ours["ranks_per_node"] is None
    content = yaml.safe_load((folder / "default_config.yaml").read_text())
    assert content["compute_environment"] == "LOCAL_MACHINE"
    assert f"written: {folder / 'lightning_dist.yaml'}" in said


def _answered(words: list[str], answers: list[tuple[str, str]], *, limit: float) -> str:
    """What the program says on a terminal on which every question gets its answer, or Enter."""
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    said, asked, end = "", 0, time.monotonic() + limit
    left = list(answers)
    try:
        while job.poll() is None or readable(ours, 0):
            assert time.monotonic() < end, said
            try:
                if readable(ours, 0.05):
                    said += os.read(ours, 1 << 16).decode(errors="replace")
            except OSError:  # how the end of a terminal is read
                break
            new = said[asked:]
            if not new.rstrip().endswith((":", HIDDEN)):
                continue
            if new.rstrip().endswith(HIDDEN) and _takes_lines(ours):
                continue  # the menu is drawn, and does not read keys yet
            asked = len(said)
            is_known = bool(left) and left[0][0] in new
            os.write(ours, f"{left.pop(0)[1] if is_known else ''}\r".encode())
        assert job.wait(60) == 0, said
    finally:
        job.kill()
        job.wait(60)
        os.close(ours)
    return said


def _takes_lines(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ICANON)
