"""AsyncStateCheckpointer on two ranks, and after a kill."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import port, run_together
from replicas import alone, of_all, require_equal
from scenarios.world import Facts, warnings

pytest.importorskip("accelerate")

from scenarios.accelerating import (
    Training,
    damage,
    names,
    no_room,
    saving,
    writers,
)
from torch.distributed import distributed_c10d

from lightning_dist.accelerate import AsyncStateCheckpointer
from lightning_dist.checkpoint.disk.folder_owner import LOCK
from lightning_dist.checkpoint.disk.format import CheckpointError, CorruptCheckpointError

pytestmark = pytest.mark.slow
KILLED = Path(__file__).with_name("accelerate_killed.py")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    """A job of two ranks and one of a single process kill themselves; their writers go on."""
    folder = tmp_path_factory.mktemp("killed")
    free = str(port())
    pair = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free}
        for rank in "01"
    ]
    commands = [[*quick_python, KILLED, folder / name] for name in ("pair", "pair", "single")]
    for finished in run_together(commands, [*pair, {}], limit=100):
        assert finished.returncode == -signal.SIGKILL, finished.output[-3000:]
    return folder


def require_same_end(found: Facts, expected: Facts) -> None:
    for key in ("parameters", "optimizer", "residuals"):
        require_equal(found[key], expected[key])
    for key in ("rate", "seen", "drawn"):
        assert found[key] == expected[key], key


def require_nothing_in_memory(project: Path) -> None:
    marks = Path("/dev/shm").glob("lightning_dist-state-*/handed_over")
    assert [mark for mark in marks if mark.read_text().startswith(str(project))] == []


def base(path: str | None) -> str:
    return Path(path or "").name


@pytest.mark.on_ranks(2)
def test_killed_ranks_resume_bit_for_bit(killed: Path) -> None:
    """Parameters, Adam, residuals, schedule, random numbers and the registered object of each."""
    with Training(None) as training:
        history, whole = training.train(6), training.facts()
    project = killed / "pair"
    with saving(project, seed=5) as (state, training):
        number = int(base(state.load_state()).removeprefix("checkpoint_"))
        done = training.schedule.scheduler.last_epoch // 2  # Accelerate has a step for each rank
        assert of_all((number, done)) == [(number, 2 * (number + 1))] * 2
        assert number in (0, 1)
        assert training.train(6 - done) == history[done:]
        require_same_end(training.facts(), whole)
        assert base(state.save_state()) == f"checkpoint_{number + 1}", "names go on"
        state.wait()
        assert names(project) == [f"checkpoint_{n}" for n in range(number + 2)]
    assert any(residual.any() for residual in whole["residuals"].values())
    first, second = of_all(whole)
    assert first["drawn"] != second["drawn"]
    assert first["seen"] != second["seen"]
    dist.barrier()
    require_nothing_in_memory(project)


@pytest.mark.on_ranks(2)
def test_stock_accelerate_loads_it_but_knows_no_objects_of_other_ranks(killed: Path) -> None:
    """Shows that bit-exactness above is not accelerate's own."""
    with Training(None) as training:
        seen = of_all(training.train(2)[1])
    with Training(killed / "pair", seed=5) as training:
        training.accelerator.load_state(str(killed / "pair" / "checkpoints" / "checkpoint_0"))
        stock = of_all(training.facts())
    require_equal(stock[0]["parameters"], stock[1]["parameters"])
    assert stock[0]["seen"] == stock[1]["seen"] == seen[0]


def test_a_killed_process_resumes_bit_for_bit(killed: Path) -> None:
    with Training(None) as training:
        history, whole = training.train(6), training.facts()
    project = killed / "single"
    with saving(project, seed=5) as (state, training):
        loaded = state.load_state()
        assert (project / "checkpoints" / LOCK).exists()
        done = {"checkpoint_0": 2, "checkpoint_1": 4}[base(loaded)]
        assert training.train(6 - done) == history[done:]
        require_same_end(training.facts(), whole)
    assert not (project / "checkpoints" / LOCK).exists(), "accelerate cannot parse this name"
    require_nothing_in_memory(project)


@pytest.mark.on_ranks(2)
def test_the_limit_holds_and_numbers_go_on_without_loading(tmp_path: Path) -> None:
    """Four saves of which two are kept, and on in another process."""
    with Training(tmp_path, total_limit=2) as training:
        with AsyncStateCheckpointer(training.accelerator) as state:
            for number in range(4):
                assert base(state.save_state()) == f"checkpoint_{number}"
            state.wait()
            assert base(state.last_committed.target) == "checkpoint_3"
        dist.barrier()
        assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"]
        training.accelerator.load_state()  # accelerate finds the newest by itself
    with saving(tmp_path, total_limit=2) as (state, training):
        assert base(state.save_state()) == "checkpoint_4", "without loading"
        state.wait()
        dist.barrier()
        assert names(tmp_path) == ["checkpoint_3", "checkpoint_4"]
        assert base(state.load_state()) == "checkpoint_4"
        assert training.accelerator.project_configuration.iteration == 5


@pytest.mark.on_ranks(2)
def test_damaged_and_incomplete_ones_are_passed_over(tmp_path: Path) -> None:
    """The newest is damaged, and one with a higher number is not even complete."""
    with saving(tmp_path) as (state, training):
        training.train(1)
        state.save_state()
        state.wait()
        before = training.facts()["parameters"]
        training.train(1)
        newest = state.save_state()
        state.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            damage(Path(newest) / "model.safetensors")
            incomplete = tmp_path / "checkpoints" / "checkpoint_9"
            incomplete.mkdir()
            (incomplete / "model.safetensors").write_bytes(b"")
        dist.barrier()
        touched = training.facts()["parameters"]
        changed = r"model\.safetensors has changed since it was written"
        with pytest.raises(CorruptCheckpointError, match=changed):
            state.load_state(newest)
        require_equal(training.facts()["parameters"], touched)
        with warnings() as messages:
            assert base(state.load_state()) == "checkpoint_0"
        require_equal(training.facts()["parameters"], before)
        if dist.get_rank() == 0:
            warned = "\n".join(messages)
            assert "checkpoint_1: model.safetensors has changed" in warned
            assert "checkpoint_9: it has no manifest.json" in warned
        assert base(state.save_state()) == "checkpoint_10"


@pytest.mark.on_ranks(2)
def test_a_failure_on_one_rank_is_raised_once_on_all(tmp_path: Path) -> None:
    """The writer of rank 1 cannot write more than some bytes."""
    says = "checkpoint_1 of step 1 was not written: rank 1 could not write: OSError"
    with saving(tmp_path, total_limit=1) as (state, _):
        state.save_state()
        state.wait()
        dist.barrier()
        (writer,) = writers()
        with no_room(500, pid=writer) if dist.get_rank() == 1 else nullcontext():
            state.save_state()
            with pytest.raises(CheckpointError, match=says):
                state.save_state()
            assert names(tmp_path) == ["checkpoint_0"]
        state.wait()
        assert base(state.save_state()) == "checkpoint_2"
        state.wait()
        dist.barrier()
        assert names(tmp_path) == ["checkpoint_2"]
        assert state.metrics.failed == 1


@pytest.mark.on_ranks(2)
def test_one_rank_loads_what_two_saved_and_says_what_is_not_exact(tmp_path: Path) -> None:
    target = tmp_path / "of_two"
    with saving(None) as (state, training):
        training.train(2)
        state.save_state(target)
        state.wait()
        first, _ = of_all(training.facts())
    dist.barrier()
    with alone(), saving(None, seed=5) as (state, training), warnings() as messages:
        state.load_state(target)
        found = training.facts()
    require_equal(found["parameters"], first["parameters"])
    assert found["seen"] == first["seen"]
    warned = "\n".join(messages)
    assert "saved by 2 ranks and is loaded by 1" in warned
    assert "holds residuals of a compressed model" in warned


@pytest.mark.on_ranks(2)
def test_refusals_reach_all_ranks_and_the_next_save_works(tmp_path: Path) -> None:
    """And closing gives the process group back."""
    foreign, groups = tmp_path / "foreign", distributed_c10d._world.pg_map
    foreign.mkdir(exist_ok=True)
    (foreign / "notes.txt").write_text("mine")
    with Training(None) as training:
        before = len(groups)
        with AsyncStateCheckpointer(training.accelerator) as state:
            assert len(groups) == before + 1
            own = tmp_path / f"of_{dist.get_rank()}"
            for call, folder, error, says in (
                (state.save_state, foreign, ValueError, "AsyncStateCheckpointer did not write it"),
                (state.save_state, own, ValueError, "All ranks must save to the same folder"),
                (state.load_state, tmp_path / "none", FileNotFoundError, "There is no folder"),
            ):
                with pytest.raises(error, match=says) as refused:
                    call(folder)
                assert len(set(of_all(str(refused.value)))) == 1, says
            assert base(state.save_state(tmp_path / "after_refusals")) == "after_refusals"
            assert os.listdir(foreign) == ["notes.txt"]
        assert len(groups) == before
        state.close()
