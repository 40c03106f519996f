"""torchrun starts the ranks anew when one dies; a node joins a running job and is lost again."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, SUPPORT, Finished, port, run_together

pytestmark = pytest.mark.slow
SCRIPT = SUPPORT / "scenarios" / "elastic_job.py"
TORCHRUN = ["-m", "torch.distributed.run", "--max-restarts=2"]
LIMIT = 100.0
SAMPLES = list(range(24))


def launch(
    python: str, folder: Path, *agents: list[str], framework: str = "lightning", **options: Any
) -> Finished:
    """A job of one torchrun for every list of its options; what the first one left."""
    script = [SCRIPT, folder, framework, json.dumps({"strategy": "compressed_ddp", **options})]
    commands = [[python, *TORCHRUN, *agent, *script] for agent in agents]
    return run_together(commands, [{}] * len(agents), limit=LIMIT)[0]


def told(folder: Path, *, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def c10d(nodes: int = 1) -> list[str]:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{port()}"
    return [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-id=job", endpoint]


@pytest.mark.parametrize(
    ("framework", "options"),
    [
        ("lightning", c10d()),
        ("lightning", [f"--master-port={port()}"]),
        ("lightning", ["--standalone"]),
        ("fabric", [f"--master-port={port()}"]),
    ],
    ids=["c10d", "static", "standalone", "fabric"],
)
def test_a_job_goes_on_after_a_rank_died(
    framework: str, options: list[str], tmp_path: Path, quick_executable: str
) -> None:
    options = [*options, "--nproc-per-node=2"]
    done = launch(quick_executable, tmp_path, options, framework=framework, dies=1)
    done.require_success()
    facts = told(tmp_path, ranks=2)
    assert [each["restarts"] for each in facts] == [1, 1]
    assert sorted(facts[0]["seen"] + facts[1]["seen"]) == SAMPLES
    assert all(each["devices"] == 2 for each in facts)  # nobody had said devices=2


def test_nodes_with_different_numbers_of_ranks(tmp_path: Path, quick_executable: str) -> None:
    """Every agent counts its own restarts, so the ranks need not have the same count."""
    shared = c10d(nodes=2)
    agents = [[*shared, f"--nproc-per-node={ranks}"] for ranks in (2, 1)]
    finished = launch(
        quick_executable, tmp_path, *agents, dies=1, devices=2, num_nodes=2, plugin=True
    )
    assert "devices * num_nodes is" not in finished.require_success().output
    facts = told(tmp_path, ranks=3)
    assert max(each["restarts"] for each in facts) == 1
    assert sorted(number for each in facts for number in each["seen"]) == SAMPLES
    assert sorted(each["devices"] for each in facts) == [1, 2, 2]


def test_fewer_ranks_than_the_script_says(tmp_path: Path, quick_executable: str) -> None:
    finished = launch(quick_executable, tmp_path, ["--nproc-per-node=1"], devices=2, num_nodes=2)
    finished.require_success()
    (facts,) = told(tmp_path, ranks=1)
    assert sorted(facts["seen"]) == SAMPLES
    assert facts["num_nodes"] == 1
    told_so = "follows the launcher: 1 ranks on this node, not devices=2 and 1 nodes, not num_nodes"
    assert finished.output.count(told_so) == 1


def test_stock_ddp_with_the_plugin(tmp_path: Path, quick_executable: str) -> None:
    """It starts, and says what Lightning's sampler makes of a world size that is another."""
    options = ["--nproc-per-node=1"]
    finished = launch(quick_executable, tmp_path, options, strategy="ddp", plugin=True, devices=2)
    finished.require_success()
    assert "devices * num_nodes is 2 * 1" in finished.output
    (facts,) = told(tmp_path, ranks=1)
    assert facts["world_size"] == 1


QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.fixture
def program(quick_executable: str) -> list[str]:
    """Words of ``lightning-dist launch``."""
    return [quick_executable, "-c", "from lightning_dist.cli import main; main()", "launch"]


def of_nodes(
    folder: Path, *, stops: int = 1, signal: str = "SIGTERM", workers: int = 0
) -> list[str]:
    """The script of `scenarios/elastic_nodes.py` with its arguments."""
    return [*map(str, (SCRIPT.with_name("elastic_nodes.py"), folder, stops, signal, workers))]


SECOND = {"SECOND_NODE": "1"}


@pytest.mark.timeout(260)
@pytest.mark.parametrize(("signal", "stops"), [("SIGKILL", 1), ("SIGTERM", 2)])
def test_nodes_come_and_go(signal: str, stops: int, tmp_path: Path, program: list[str]) -> None:
    """One after the other; the node that stays may fail once, which planned stops do not use up."""
    for number in range(stops):
        os.mkfifo(tmp_path / f"alone-{number}")
    command = [
        *(*program, "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port()}"),
        *("--rdzv-conf", QUICK, "--max-restarts", "1"),
        *of_nodes(tmp_path, stops=stops, signal=signal),
    ]
    others = [
        ["sh", "-c", f"cat {tmp_path}/alone-{number} && exec {shlex.join(command)}"]
        for number in range(stops)
    ]
    environments = [{}, *[SECOND] * stops]
    stayed, *lost = run_together([command, *others], environments, limit=240)
    stayed.require_success()
    for each in lost:
        assert "SignalException" in each.output or each.returncode == -9
        assert (each.returncode == -9) == (signal == "SIGKILL")
    assert (tmp_path / "starts").read_text().split() == [*["1", "2"] * stops, "1"]
    assert (tmp_path / "ended").exists()


@pytest.mark.timeout(130)
def test_fewer_nodes_than_the_minimum_end_the_job(tmp_path: Path, program: list[str]) -> None:
    endpoint = f"127.0.0.1:{port()}"
    first, second = (
        [
            *(*program, "--nnodes", "2:3", "--rdzv-endpoint", endpoint),
            *("--rdzv-conf", f"{QUICK},join_timeout=15,is_host={is_host}"),
            *of_nodes(tmp_path, signal="SIGKILL"),
        ]
        for is_host in ("true", "false")
    )
    stayed, lost = run_together([first, second], [{}, SECOND], limit=110)
    assert lost.returncode == -9
    assert stayed.returncode == 1
    assert "RendezvousTimeoutError" in stayed.output
    assert (tmp_path / "starts").read_text().split() == ["2"]
    assert not (tmp_path / "ended").exists()


def test_a_launcher_that_gets_sigterm_leaves_a_checkpoint(
    tmp_path: Path, program: list[str]
) -> None:
    """Of ranks whose loaders have workers."""
    command = [*program, "--nproc-per-node", "2", *of_nodes(tmp_path, workers=1)]
    (done,) = run_together([command], [SECOND], limit=LIMIT)
    assert "checkpoint committed" in done.output
    assert list((tmp_path / "ckpt").glob("*.ckpt"))


def test_the_example_runs_under_the_launcher(tmp_path: Path, program: list[str]) -> None:
    example = ROOT / "examples" / "elastic_train.py"
    arguments = ["--folder", str(tmp_path / "out"), "--steps", "12"]
    command = [*program, "--nproc-per-node", "2", str(example), *arguments]
    (done,) = run_together([command], [{}], limit=LIMIT)
    done.require_success()
    assert "elastic: world 2, fresh start; global batch 16: 1 micro-batch on 2 ranks" in done.output
    assert list((tmp_path / "out").glob("*step=12.ckpt"))


@pytest.mark.exhaustive
def test_ranks_whose_launcher_was_killed_make_way(tmp_path: Path) -> None:
    """They save and end; the next start, which has no restarts, waits for them and goes on."""
    os.mkfifo(tmp_path / "next")
    script = str(SCRIPT.with_name("killed_launcher.py"))
    program = [sys.executable, "-m", "lightning_dist", "launch"]  # not forks of one server
    command = [*program, "--nproc-per-node=2", "--max-restarts=0", script, str(tmp_path)]
    following = ["sh", "-c", f"cat {tmp_path}/next && exec {shlex.join(command)}"]
    killed, went_on = run_together([command, following], [{}, {}], limit=200)
    assert killed.returncode == -9
    went_on.require_success()
    first, second = map(int, (tmp_path / "starts").read_text().split())
    assert first == 0
    assert second >= 5
    assert (tmp_path / "ended").exists()
    assert "the launcher of this process has terminated" in killed.output
