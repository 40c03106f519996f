"""A node joins a running job and is lost again."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from processes import port, run_together

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("scenarios") / "elastic_nodes.py"
LIMIT = 110.0
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.fixture
def program(quick_executable: str) -> list[str]:
    """Words of ``lightning-dist launch``."""
    return [quick_executable, "-c", "from lightning_dist.cli import main; main()", "launch"]


@pytest.mark.timeout(LIMIT + 20)
def test_a_node_comes_and_goes(tmp_path: Path, program: list[str]) -> None:
    pipe = tmp_path / "alone"
    os.mkfifo(pipe)
    command = [
        *(*program, "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port()}"),
        *("--rdzv-conf", QUICK),
        *(str(SCRIPT), str(tmp_path)),
    ]
    second = ["sh", "-c", f"cat {shlex.quote(str(pipe))} && exec {shlex.join(command)}"]
    stayed, lost = run_together([command, second], [{}, {"SECOND_NODE": "1"}], limit=LIMIT)
    stayed.require_success()
    assert lost.returncode == -9
    assert (tmp_path / "starts").read_text().split() == ["1", "2", "1"]
    assert (tmp_path / "ended").exists()


@pytest.mark.timeout(LIMIT + 20)
def test_fewer_nodes_than_the_minimum_end_the_job(tmp_path: Path, program: list[str]) -> None:
    endpoint = f"127.0.0.1:{port()}"
    first, second = (
        [
            *(*program, "--nnodes", "2:3", "--rdzv-endpoint", endpoint),
            *("--rdzv-conf", f"{QUICK},join_timeout=15,is_host={is_host}"),
            *(str(SCRIPT), str(tmp_path)),
        ]
        for is_host in ("true", "false")
    )
    stayed, lost = run_together([first, second], [{}, {"SECOND_NODE": "1"}], limit=LIMIT)
    assert lost.returncode == -9
    assert stayed.returncode == 1
    assert "RendezvousTimeoutError" in stayed.output
    assert (tmp_path / "starts").read_text().split() == ["2"]
    assert not (tmp_path / "ended").exists()


def test_a_launcher_that_gets_sigterm_leaves_a_checkpoint(
    tmp_path: Path, program: list[str]
) -> None:
    script = SCRIPT.with_name("elastic_told.py")
    command = [*program, "--nproc-per-node", "2", str(script), str(tmp_path)]
    (done,) = run_together([command], [{}], limit=LIMIT)
    assert "checkpoint committed" in done.output
    assert list(tmp_path.glob("*.ckpt"))


def test_the_example_runs_under_the_launcher(tmp_path: Path, program: list[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "elastic_train.py"
    arguments = ["--folder", str(tmp_path / "out"), "--steps", "12"]
    command = [*program, "--nproc-per-node", "2", str(example), *arguments]
    (done,) = run_together([command], [{}], limit=LIMIT)
    done.require_success()
    assert "elastic: world 2, fresh start; global batch 16: 1 micro-batch on 2 ranks" in done.output
    assert list((tmp_path / "out").glob("*step=12.ckpt"))


@pytest.mark.timeout(260)
def test_planned_stops_do_not_use_up_the_restarts_for_failures(
    tmp_path: Path, program: list[str]
) -> None:
    """Two nodes are told to end, one after the other, and the node that stays may fail once."""
    stops, endpoint = 2, f"127.0.0.1:{port()}"
    for number in range(stops):
        os.mkfifo(tmp_path / f"alone-{number}")
    command = [
        *(*program, "--nnodes", "1:2", "--max-restarts", "1", "--rdzv-endpoint", endpoint),
        *("--rdzv-conf", QUICK),
        *(str(SCRIPT.with_name("elastic_preempted.py")), str(tmp_path), str(stops)),
    ]
    others = [
        ["sh", "-c", f"cat {tmp_path}/alone-{number} && exec {shlex.join(command)}"]
        for number in range(stops)
    ]
    environments = [{}, *({"SECOND_NODE": "1"} for _ in others)]
    stayed, *told = run_together([command, *others], environments, limit=240)
    stayed.require_success()
    assert all("SignalException" in each.output for each in told)
    assert (tmp_path / "starts").read_text().split() == ["1", "2", "1", "2", "1"]
    assert (tmp_path / "ended").exists()
