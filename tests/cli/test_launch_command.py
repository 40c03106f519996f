"""``lightning-dist launch``: what it makes of a command line, and a few real jobs."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from calls import program, refusal
from click.testing import Result
from processes import readable, run
from torch.distributed.run import get_args_parser

SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PROGRAM = [sys.executable, "-c", "from lightning_dist.cli import main; main()", "launch"]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARING, raising=False)
    monkeypatch.setenv("HF_HOME", "/no/such/folder")  # where nobody has configured Accelerate


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def invoke(*words: str | Path) -> Result:
    return program("launch", *words)


def planned(*words: str | Path) -> tuple[dict[str, str], list[str]]:
    """Variables and torchrun's arguments of a dry run."""
    result = invoke("--dry-run", *words)
    assert result.exit_code == 0, result.output
    parts = shlex.split(result.stdout)
    start = parts.index(sys.executable)
    assert parts[start + 1 : start + 3] == ["-m", "lightning_dist.elastic.launcher"]
    arguments = parts[start + 3 :]
    arguments.remove("--")
    return dict(part.split("=") for part in parts[:start]), arguments


def test_one_node(script: Path) -> None:
    environment, arguments = planned("--nproc-per-node", "2", script, "--lr", "0.1")
    assert environment == {SHARING: "1"}
    ours = ["--max-restarts=3", "--standalone"]
    assert arguments == ["--nproc-per-node", "2", *ours, str(script), "--lr", "0.1"]


def test_nodes_that_come_and_go(script: Path) -> None:
    environment, arguments = planned("--nnodes=1:4", "--rdzv-endpoint=node0:29400", script)
    assert environment == {SHARING: "1"}
    given = get_args_parser().parse_args(arguments)
    assert given.rdzv_backend == "c10d"
    assert given.rdzv_conf.split(",") == [
        "last_call_timeout=5",
        "keep_alive_interval=2",
        "keep_alive_max_attempt=5",
    ]


def test_what_the_user_gave_wins(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARING, "0")
    environment, arguments = planned(
        *("--nnodes", "1:4", "--rdzv-endpoint", "node0:29400", "--max_restarts", "7"),
        *("--rdzv-conf", "last_call_timeout=9,join_timeout=60", script),
    )
    assert environment == {}
    given = get_args_parser().parse_args(arguments)
    assert given.max_restarts == 7
    settings = dict(pair.split("=") for pair in given.rdzv_conf.split(","))
    assert settings["last_call_timeout"] == "9"
    assert settings["join_timeout"] == "60"
    assert settings["keep_alive_interval"] == "2"


def test_torchruns_own_variables_are_the_users_too(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "9")
    assert planned(script)[1] == ["--standalone", str(script)]


def test_a_static_rendezvous_stays_one(script: Path) -> None:
    environment, arguments = planned("--nnodes=2", "--master-port=4711", script)
    assert environment == {}
    assert arguments == ["--nnodes=2", "--master-port=4711", "--max-restarts=3", str(script)]


@pytest.mark.parametrize("words", [["--help"], ["--dry-run"], ["--", "x"], ["--max-restarts", "1"]])
def test_what_follows_the_script_is_the_scripts(script: Path, words: list[str]) -> None:
    assert planned(script, *words)[1][-len(words) - 1 :] == [str(script), *words]


def test_a_module() -> None:
    assert planned("-m", "package.train", "--x")[1][-2:] == ["package.train", "--x"]


def test_every_setting_is_printed_in_a_line(script: Path) -> None:
    result = invoke("--dry-run", script)
    assert [line.split()[:2] for line in result.stderr.splitlines()] == [
        ["lightning-dist:", "torchrun"],
        ["lightning-dist:", "--max-restarts=3"],
        ["lightning-dist:", "--standalone"],
        ["lightning-dist:", f"{SHARING}=1"],
    ]


@pytest.mark.parametrize(("more", "patience"), [([], 600), (["--rdzv-conf=join_timeout=60"], 60)])
def test_too_few_nodes_are_explained(script: Path, more: list[str], patience: int) -> None:
    result = invoke("--dry-run", "--nnodes=2:4", "--rdzv-endpoint=node0:29400", *more, script)
    assert "RendezvousTimeoutError means that fewer than 2 nodes joined" in result.stderr
    assert f"in {patience} s" in result.stderr
    alone = invoke("--dry-run", "--nnodes=1:4", "--rdzv-endpoint=node0:29400", *more, script)
    assert "RendezvousTimeoutError" not in alone.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "No script: lightning-dist launch [OPTIONS] script.py"),
        ("--nproc-per-node 2", "No script"),
        ("missing.py", "There is no script missing.py"),
        ("--nnodes 4:1 SCRIPT", "--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, got 4:1"),
        ("--nnodes some SCRIPT", "got some"),
        ("--nnodes 1:2:3 SCRIPT", "got 1:2:3"),
        ("--nnodes 0 SCRIPT", "got 0"),
        ("--nproc-per-node 0 SCRIPT", "--nproc-per-node must be a number above 0"),
        ("--nproc-per-node=-1 SCRIPT", "got -1"),
        ("--nproc-per-node two SCRIPT", "or auto, cpu, gpu, xpu or npu, got two"),
        ("--max-restarts=-1 SCRIPT", "--max-restarts must be 0 or more, got -1"),
        ("--nproc-per-node -2 missing.py", "-m MODULE; --nproc-per-node must be a number above 0"),
        ("--max-restarts many SCRIPT", "invalid int value: 'many'"),
        ("--no-such-option SCRIPT", "--no-such-option"),
        ("--nnodes 1:2 SCRIPT", "--nnodes=1:2 needs --rdzv-endpoint=HOST:PORT"),
        ("--nnodes 1:2 --standalone SCRIPT", "--standalone is for one node"),
        ("--nnodes 1:2 --master-port 4711 SCRIPT", "A static rendezvous"),
        ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf x SCRIPT", "--rdzv-conf must be KEY=VALUE"),
    ],
)
def test_bad_input(script: Path, words: str, problem: str) -> None:
    given = (script if word == "SCRIPT" else word for word in words.split())
    assert problem in refusal("launch", *given)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("MIN_WORKERS", "9", "got 9 and 8"),
        ("BEAT_TIMEOUT", "soon", "LIGHTNING_DIST_BEAT_TIMEOUT must be a number, got 'soon'"),
    ],
)
def test_bad_limits_of_recovery(
    script: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(f"LIGHTNING_DIST_{name}", value)
    words = ("--nnodes=1:4", "--rdzv-endpoint=a:1", "--nproc-per-node=2")
    assert problem in refusal("launch", *words, script)


@pytest.mark.slow
def test_a_failed_rank_is_started_again(script: Path) -> None:
    script.write_text(
        "import os, sys\nprint('start', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    finished = run([*PROGRAM, script], limit=100).require_success()
    assert finished.output.count("start 0") == finished.output.count("start 1") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 15)", 128 + 15)]
)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_exit_code_is_that_of_the_script(
    tmp_path: Path, script: Path, launcher: str, end: str, code: int
) -> None:
    script.write_text(f"import os, sys\n{end}\n")
    options = ["--max-restarts=0"]
    if launcher == "accelerate":
        file = tmp_path / "one.yaml"
        file.write_text("num_processes: 1\nuse_cpu: true\ndistributed_type: 'NO'\n")
        options = ["--config_file", str(file)]
    finished = run([*PROGRAM, *options, script], limit=100)
    assert finished.returncode == code
    assert script.name in finished.output  # what the launcher says of it is still there


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_ranks(script: Path, sent: signal.Signals) -> None:
    script.write_text(
        "import os, signal\nos.write(1, b'rank %d\\n' % os.getpid())\nwhile True: signal.pause()\n"
    )
    command = [*PROGRAM, "--nproc-per-node=2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        assert job.stdout is not None
        ranks = []
        try:
            ranks = [os.pidfd_open(int(job.stdout.readline().split()[1])) for _ in range(2)]
            job.send_signal(sent)
            assert job.wait(60) != 0
            for rank in ranks:
                assert readable(rank, 30), "a rank is still there"
        finally:
            job.kill()
            for rank in ranks:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
                os.close(rank)
