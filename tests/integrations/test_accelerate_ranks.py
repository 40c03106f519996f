"""AsyncStateCheckpointer on two ranks, and after a kill."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from processes import port, run_together, torchrun
from results import Facts, Results, require_equal

pytest.importorskip("accelerate")

from scenarios.accelerating import Training

from lightning_dist.accelerate import AsyncStateCheckpointer
from lightning_dist.checkpoint.disk.folder_owner import LOCK

HERE = Path(__file__).parent
RUNNER = HERE / "run_scenarios.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
KILLED = HERE / "scenarios" / "accelerate_killed.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def killed(folder: Path, quick_python: list[str]) -> None:
    """A job of two ranks and one of a single process kill themselves; their writers go on."""
    free = str(port())
    pair = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free}
        for rank in "01"
    ]
    commands = [[*quick_python, KILLED, folder / name] for name in ("killed", "killed", "single")]
    for finished in run_together(commands, [*pair, {}], limit=100):
        assert finished.returncode == -signal.SIGKILL, finished.output[-3000:]


@pytest.fixture(scope="module")
def pair(folder: Path, killed: None, quick_python: list[str]) -> Results:
    finished = torchrun(
        RUNNER, folder, "accelerate_states", ranks=2, limit=170, python=quick_python
    )
    return Results(folder, finished, ranks=2)


def both(ranks: list[Facts], key: str) -> Any:
    """A fact that is the same on both ranks."""
    assert ranks[0][key] == ranks[1][key]
    return ranks[0][key]


def require_same_end(found: Facts, expected: Facts) -> None:
    for key in ("parameters", "optimizer", "residuals"):
        require_equal(found[key], expected[key])
    assert [found[k] for k in ("rate", "seen", "drawn")] == [
        expected[k] for k in ("rate", "seen", "drawn")
    ]


def test_killed_ranks_resume_bit_for_bit(pair: Results) -> None:
    """Parameters, Adam, residuals, schedule, random numbers and the registered object of each."""
    whole, resumed = pair("uninterrupted"), pair("resumed")
    assert both(resumed, "done") in (2, 4)
    for of_whole, of_resumed in zip(whole, resumed, strict=True):
        assert of_resumed["history"] == of_whole["history"][of_resumed["done"] :]
        require_same_end(of_resumed, of_whole)
        assert any(residual.any() for residual in of_whole["residuals"].values())
    assert whole[0]["drawn"] != whole[1]["drawn"]
    assert whole[0]["seen"] != whole[1]["seen"]


def test_names_go_on_after_a_kill(pair: Results) -> None:
    resumed = pair("resumed")
    number = int(both(resumed, "loaded").removeprefix("checkpoint_"))
    assert both(resumed, "saved") == f"checkpoint_{number + 1}"
    assert both(resumed, "names") == [f"checkpoint_{n}" for n in range(number + 2)]


def test_stock_accelerate_loads_it_but_knows_no_objects_of_other_ranks(pair: Results) -> None:
    """Shows that bit-exactness above is not accelerate's own."""
    stock, whole = pair("own_objects_are_needed"), pair("uninterrupted")
    require_equal(stock[0]["parameters"], stock[1]["parameters"])
    assert stock[0]["seen"] == stock[1]["seen"] == whole[0]["history"][1]


def test_the_limit_holds_and_numbers_go_on_without_loading(pair: Results) -> None:
    ranks = pair("limited")
    assert both(ranks, "saved") == [f"checkpoint_{n}" for n in range(4)]
    assert both(ranks, "committed") == "checkpoint_3"
    assert both(ranks, "first") == ["checkpoint_2", "checkpoint_3"]
    assert both(ranks, "again") == "checkpoint_4"
    assert ranks[0]["second"] == ["checkpoint_3", "checkpoint_4"]
    assert both(ranks, "loaded") == "checkpoint_4"
    assert both(ranks, "iteration") == 5


def test_damaged_and_incomplete_ones_are_passed_over(pair: Results) -> None:
    ranks = pair("passed_over")
    assert both(ranks, "loaded") == "checkpoint_0"
    for facts in ranks:
        require_equal(facts["after"], facts["before"])
        assert facts["same"], "a damaged checkpoint touched the model"
        assert facts["explicit"].startswith("CorruptCheckpointError: ")
        assert "model.safetensors has changed since it was written" in facts["explicit"]
    warned = "\n".join(ranks[0]["messages"])
    assert "checkpoint_1: model.safetensors has changed" in warned
    assert "checkpoint_9: it has no manifest.json" in warned
    assert both(ranks, "following") == "checkpoint_10"


def test_a_failure_on_one_rank_is_raised_once_on_all(pair: Results) -> None:
    ranks = pair("full")
    for facts in ranks:
        assert facts["surfaced"].startswith("CheckpointError: ")
        assert (
            "checkpoint_1 of step 1 was not written: rank 1 could not write: OSError"
            in facts["surfaced"]
        )
        assert facts["kept"] == ["checkpoint_0"]
        assert facts["waited"] == ""
        assert facts["failed"] == 1
    assert both(ranks, "saved") == "checkpoint_2"
    assert ranks[0]["names"] == ["checkpoint_2"]


def test_one_rank_loads_what_two_saved_and_says_what_is_not_exact(pair: Results) -> None:
    ranks = pair("fewer_ranks")
    for facts in ranks:
        require_equal(facts["facts"]["parameters"], ranks[0]["first"]["parameters"])
        assert facts["facts"]["seen"] == ranks[0]["first"]["seen"]
        warned = "\n".join(facts["messages"])
        assert "saved by 2 ranks and is loaded by 1" in warned
        assert "holds residuals of a compressed model" in warned


def test_refusals_reach_all_ranks_and_the_next_save_works(pair: Results) -> None:
    ranks = pair("refused_together")
    assert "AsyncStateCheckpointer did not write it" in both(ranks, "foreign")
    assert "All ranks must save to the same folder" in both(ranks, "different")
    assert both(ranks, "missing").startswith("FileNotFoundError: There is no folder")
    assert both(ranks, "saved") == "after_refusals"
    assert both(ranks, "left") == ["notes.txt"]


def test_closing_gives_the_process_group_back(pair: Results) -> None:
    for facts in pair("groups"):
        before, within, after = facts["groups"]
        assert before == after == within - 1


def test_both_launches_leave_nothing_in_memory(pair: Results) -> None:
    pair.finished.require_success()


def test_a_killed_process_resumes_bit_for_bit(folder: Path, pair: Results) -> None:
    """And nothing of either job is left in memory after that."""
    with Training(None) as training:
        history, whole = training.train(6), training.facts()
    project = folder / "single"
    with (
        Training(project, seed=5) as training,
        AsyncStateCheckpointer(training.accelerator) as state,
    ):
        loaded = state.load_state()
        assert (project / "checkpoints" / LOCK).exists()
        done = {"checkpoint_0": 2, "checkpoint_1": 4}[Path(loaded).name]
        assert training.train(6 - done) == history[done:]
        require_same_end(training.facts(), whole)
    assert not (project / "checkpoints" / LOCK).exists(), "accelerate cannot parse this name"
    marks = Path("/dev/shm").glob("lightning_dist-state-*/handed_over")
    assert [mark for mark in marks if mark.read_text().startswith(str(folder))] == []
