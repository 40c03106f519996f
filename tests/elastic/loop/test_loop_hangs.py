"""Loops whose ranks are stopped, hang, are without a launcher, or have a spare."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from needs import needs
from processes import environment_of, kill_tree, run
from recovering_jobs import STEP, LoopJob, TrainerJob
from tiers import some_exhaustive

from lightning_dist.base.features import RECOVERY
from lightning_dist.elastic.recovery.coordinator import RecoveryNode

pytestmark = [needs(RECOVERY), pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.ranks(3)]


@pytest.mark.parametrize("kind", some_exhaustive([LoopJob, TrainerJob], [LoopJob]))
def test_ranks_that_are_stopped_while_they_save_send_and_receive(
    kind: type[LoopJob], tmp_path: Path, quick_python: list[str]
) -> None:
    """Two nodes of two ranks: a rank in a save, the source of the one in its place, and another."""
    faults = [
        ["0.1.0", "saving", 3, "stop"],
        ["0.0.0", "source", None, "stop"],
        ["0.0.1", "healed", None, "stop"],
    ]
    told: dict[str, Any] = {"ranks": 4, "per_host": 2, "restarts": 9, "limit": 200}
    job = kind(tmp_path, quick_python, beats="5", faults=faults, joins=5, **told)
    job.require_exact()
    for victim, *_ in faults:
        assert f"killing worker {victim}: no heartbeat for " in job.output
    assert all(line["levels"] == (line["world"] > 2) for line in job.of("committed"))
    assert {line["world"] for line in job.lines["0.0.2"] if "committed" in line} == {4}
    # Nothing is sent or saved in a step.
    assert " is repeated" not in job.output


def test_a_rank_that_keeps_its_threads_from_running_is_not_dead(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """The leader, for thrice the timeout of heartbeats: it sorts, or reads JSON."""
    faults = [["0.0.0", "forward", STEP, "hold"]]
    job = LoopJob(tmp_path, quick_python, beats="3", faults=faults)
    job.require_exact()
    assert set(job.members()) - {-1} == {0}
    assert "no heartbeat" not in job.output


@pytest.mark.parametrize("kind", some_exhaustive([LoopJob, TrainerJob], [LoopJob]))
def test_a_rank_that_is_lost_again_and_again_while_it_comes_back(
    kind: type[LoopJob], tmp_path: Path, quick_python: list[str]
) -> None:
    """The others go on after each loss, with the step before or the next."""
    places = ["warm-up", "groups", "healed", "forward", "between buckets", "after the vote"]
    faults: list[list[Any]] = [["0.1.0", "between buckets", 1]]
    faults += [[f"0.1.{number}", place, None] for number, place in enumerate(places, 1)]
    told = {"restarts": 9, "limit": 200}
    job = kind(tmp_path, quick_python, faults=faults, joins=2, **told)
    job.require_exact()
    for victim, *_ in faults:
        assert f"worker {victim} exited: SIGKILL" in job.output
    assert "0.2.1" not in job.lines
    assert job.steps_of("0.1.7") >= {14, 15}
    # In warm-up and while it is made a member it takes part in no step.
    again = [line for line in job.output.splitlines() if " is repeated" in line]
    assert len(again) <= 4
    assert len({*again}) == len(again)


@pytest.mark.parametrize(
    "place",
    some_exhaustive(
        ["forward", "between buckets", "after the step"], ["forward", "after the step"]
    ),
)
def test_a_rank_that_hangs_in_code_of_the_user_ends_itself_alone(
    place: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """It beats; the others wait as long without progress, but for one that is behind them."""
    fault = ["0.1.0", place, STEP, "hang"]
    job = LoopJob(tmp_path, quick_python, faults=[fault], joins=10, hang_timeout=15.0)
    job.require_exact()
    assert "worker 0.1.0 exited: exit code 76" in job.output
    assert job.output.count(" exited: ") == 1


def test_workers_without_a_launcher_end_and_say_why(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Nobody could tell them who takes part."""
    log = tmp_path / "output"
    told = json.dumps({"epochs": 100_000})
    words = [sys.executable, "-m", "lightning_dist.elastic.launcher", "--standalone"]
    words += ["--nproc-per-node=3", "--no-python", *quick_python]
    words += map(str, (LoopJob.script, tmp_path, told))
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            words, env=environment_of({}), stdout=output, stderr=output, start_new_session=True
        )
    try:
        end = time.monotonic() + 100
        while not three_train(tmp_path):
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        workers = psutil.Process(launcher.pid).children()
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(workers, timeout=60)
    finally:
        kill_tree(launcher.pid)
        launcher.wait()
    said = log.read_text()
    assert not alive, said
    assert said.count("this process exits with code 75: the launcher's store") == 3, said


def test_the_same_bits_where_another_takes_the_place_within_the_step(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """A spare waits: the interrupted step is taken again by as many ranks as before.

    Rank 0 drops the same inputs again.
    """
    quiet, faulty = (tmp_path / name for name in ("quiet", "faulty"))
    faulty.mkdir()
    expected = LoopJob(quiet, quick_python, dropout="0.0.0")
    threads = ThreadPoolExecutor(1)
    spare = threads.submit(_run_spare, faulty, quick_python)
    fault = ["0.1.0", "between buckets", STEP]
    job = LoopJob(faulty, quick_python, faults=[fault], spare=["0.3.0", STEP], dropout="0.0.0")
    spare.result(200)
    job.require_exact()
    assert any("0.3.0" in names for names in job.members().values())
    assert all(line["world"] == 3 for line in job.of("committed"))
    # The process that the launcher starts finds all places taken, so nobody pauses for it.
    assert {line["generation"] for line in job.of("committed")} == {0, 1}
    assert job.by_step("hash") == expected.by_step("hash")
    for name, weight in job.weights().items():
        torch.testing.assert_close(weight, expected.weights()[name], rtol=1e-12, atol=1e-15)


def three_train(folder: Path) -> bool:
    """Whether as many workers have committed a step."""
    return sum("committed" in path.read_text() for path in folder.glob("*.jsonl")) >= 3


def _run_spare(folder: Path, python: list[str]) -> None:
    """A worker that no launcher has started: it waits, since all places are taken."""
    end = time.monotonic() + 100
    while not three_train(folder):  # before that it could come for one of their places
        assert time.monotonic() < end
        time.sleep(0.02)
    address = (folder / "store").read_text()
    node = RecoveryNode(address, ranks=4, min_workers=1)
    node.join(0)
    told = json.dumps({})
    environment = {**node.start(3), "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "3"}
    run([*python, LoopJob.script, folder, told], limit=200, **environment).require_success()
    node.report_end(node.workers[3], "")
