"""Loops whose ranks are killed: the others take the step again, and newcomers join them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import environment_of, kill_tree, run
from recovering_loops import EPOCHS, SIZE, train

from lightning_dist.elastic.recovery.node import RecoveryNode

SCRIPT = Path(__file__).parent / "recovering_loops.py"
STEP = 6
"""The step in whose course a rank is killed, counted from 0; that of an epoch has 5."""
PLACES = ("forward", "between buckets", "before the vote", "after the vote", "after the step")
QUICK = ("0.1.0", "between buckets")

pytestmark = pytest.mark.timeout(400)


class Job:
    """Three ranks under our launcher, and what they have written down.

    beats: seconds without one after which a rank is dead; a busy machine is not a hang.
    """

    def __init__(self, folder: Path, python: list[str], *, beats: str = "60", **told: Any) -> None:
        self.folder = folder
        options = ["--monitor-interval=0.05", "--standalone", "--nproc-per-node=3"]
        launcher = [*python, "-m", "lightning_dist.elastic.agent", *options, "--max-restarts=3"]
        script = ["--no-python", *python, SCRIPT, folder, json.dumps(told)]
        done = run([*launcher, *script], limit=300, LIGHTNING_DIST_BEAT_TIMEOUT=beats)
        self.output = done.require_success().output
        self.lines: dict[str, list[dict[str, Any]]] = {}
        for path in folder.glob("*.*.*.jsonl"):
            self.lines[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for lines in self.lines.values() for line in lines if kind in line]

    def samples(self) -> dict[int, list[int]]:
        """Those of every epoch that are in the weights."""
        taken = {line["committed"]: line["generation"] for line in self.of("committed")}
        found = defaultdict(list)
        for line in self.of("computed"):
            if taken.get(line["computed"]) == line["generation"]:
                found[line["epoch"]] += line["ids"]
        return {epoch: sorted(ids) for epoch, ids in found.items()}

    def passes(self) -> int:
        """Of all steps that were committed: one, or two where two ranks do the work of three."""
        taken = {line["committed"]: line["generation"] for line in self.of("committed")}
        members = self.members()
        return sum(1 if len(members[generation]) == 3 else 2 for generation in taken.values())

    def members(self) -> dict[int, set[str]]:
        """Those of every generation that have computed something in it."""
        found: dict[int, set[str]] = defaultdict(set)
        for name, lines in self.lines.items():
            for line in lines:
                found[line.get("generation", -1)].add(name)
        return found

    def require_exact(self) -> None:
        """Every sample once in each epoch, and equal weights on all ranks after every step."""
        assert self.samples() == {epoch: list(range(SIZE)) for epoch in range(EPOCHS)}
        hashes, rates = defaultdict(set), defaultdict(set)
        for line in self.of("committed"):
            hashes[line["committed"]].add(line["hash"])
            rates[line["committed"]].add(line["lr"])
        assert sorted(hashes) == list(range(1, EPOCHS * SIZE // 12 + 1))
        assert all(len(found) == 1 for found in (*hashes.values(), *rates.values()))
        assert len({line["hash"] for line in self.of("end")}) == 1
        assert len(self.of("end")) == 3

    def require_weights(self, expected: dict[str, torch.Tensor]) -> None:
        for name, weight in self.weights().items():
            if name != "passes":  # of micro-batches
                torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9)

    def weights(self) -> dict[str, torch.Tensor]:
        newest = max(self.folder.glob("weights-*.pt"))
        found: dict[str, torch.Tensor] = torch.load(newest)
        return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run of one process without a fault."""
    return dict(train(tmp_path_factory.mktemp("reference"), {}).state_dict())


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        pytest.param(each, place, marks=() if (each, place) == QUICK else pytest.mark.slow)
        for each in ("0.0.0", "0.1.0", "0.2.0")
        for place in PLACES
    ],
)
def test_a_killed_rank_costs_no_sample_and_changes_no_weight(
    victim: str,
    place: str,
    expected: dict[str, torch.Tensor],
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """Whoever comes in its place takes part in the last steps."""
    new = f"{victim[:-1]}1"
    job = Job(tmp_path, quick_python, faults=[[victim, place, STEP]], joins=10)
    job.require_exact()
    weights = job.weights()
    assert weights.pop("passes") == job.passes()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9)
    worlds = {line["committed"]: line["world"] for line in job.of("committed")}
    assert worlds[STEP] == worlds[EPOCHS * SIZE // 12] == 3
    assert {line["committed"] for line in job.lines[new] if "committed" in line} >= {13, 14, 15}
    assert any(len(names) == 2 for names in job.members().values())


def test_compressed_ranks_stay_equal_and_whoever_misses_the_answer_commits(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Rank 0 dies after a vote whose answer rank 1 has not heard, and rank 2 has."""
    job = Job(
        tmp_path,
        quick_python,
        codec="int8",
        faults=[["0.0.0", "after the vote", STEP]],
        lost=[["0.1.0", STEP, "0.2.0"]],
        joins=10,
    )
    job.require_exact()
    taken = [line for line in job.of("committed") if line["committed"] == STEP + 1]
    assert {line["generation"] for line in taken} == {0}
    assert len(taken) == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0.0.0", "0.1.0"])
def test_a_rank_that_is_stopped_is_replaced(
    victim: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    fault = [victim, "between buckets", STEP, "stop"]
    job = Job(tmp_path, quick_python, beats="5", faults=[fault], joins=10)
    job.require_exact()
    job.require_weights(expected)
    assert f"worker {victim} is killed: no sign of life for 5" in job.output
    assert {line["committed"] for line in job.lines[f"{victim[:-1]}1"] if "committed" in line}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "between buckets", "after the step"])
def test_a_rank_that_hangs_in_code_of_the_user_ends_itself_alone(
    place: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """It beats; the others wait as long without progress, but for one that is behind them."""
    fault = ["0.1.0", place, STEP, "hang"]
    job = Job(tmp_path, quick_python, faults=[fault], joins=10, hang_timeout=15.0)
    job.require_exact()
    job.require_weights(expected)
    assert "worker 0.1.0 has ended: exit code 76" in job.output
    assert job.output.count("has ended:") == 1


@pytest.mark.slow
def test_two_ranks_at_once(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """One is left, and goes on alone until both others have come again."""
    both = [["0.0.0", "between buckets", STEP], ["0.2.0", "after the vote", STEP - 1]]
    job = Job(tmp_path, quick_python, faults=both, joins=10)
    job.require_exact()
    job.require_weights(expected)


@pytest.mark.slow
def test_workers_without_a_launcher_end_and_say_why(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Nobody could tell them who takes part."""
    log = tmp_path / "output"
    told = json.dumps({"epochs": 100_000})
    words = [sys.executable, "-m", "lightning_dist.elastic.agent", "--standalone"]
    words += ["--nproc-per-node=3", "--no-python", *quick_python, str(SCRIPT), str(tmp_path), told]
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            words, env=environment_of({}), stdout=output, stderr=output, start_new_session=True
        )
    try:
        end = time.monotonic() + 100
        while (
            len([path for path in tmp_path.glob("*.jsonl") if "committed" in path.read_text()]) < 3
        ):
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
    assert said.count("this process ends (exit code 75): the launcher's store") == 3, said


@pytest.mark.slow
def test_the_same_bits_where_another_takes_the_place_within_the_step(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """A spare waits: the interrupted step is taken again by as many ranks as before."""
    quiet, faulty = (tmp_path / name for name in ("quiet", "faulty"))
    for folder in (quiet, faulty):
        folder.mkdir()
    Job(quiet, quick_python)
    threads = ThreadPoolExecutor(1)
    spare = threads.submit(_run_spare, faulty, quick_python)
    fault = ["0.1.0", "between buckets", STEP]
    job = Job(faulty, quick_python, faults=[fault], spare=["0.3.0", STEP])
    spare.result(200)
    job.require_exact()
    assert any("0.3.0" in names for names in job.members().values())
    assert all(line["world"] == 3 for line in job.of("committed"))
    theirs = torch.load(max(quiet.glob("weights-*.pt")))
    for name, weight in job.weights().items():
        assert torch.equal(weight, theirs[name]), name


def _run_spare(folder: Path, python: list[str]) -> None:
    """A worker that no launcher has started: it waits, since all places are taken."""
    end = time.monotonic() + 100
    while not (folder / "store").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    address = (folder / "store").read_text()
    node = RecoveryNode(address, ranks=4, min_workers=1)
    node.come(0)
    told = json.dumps({})
    environment = {**node.start(3), "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "3"}
    run([*python, SCRIPT, folder, told], limit=200, **environment).require_success()
    node.tell_end(node.workers[3], "")
