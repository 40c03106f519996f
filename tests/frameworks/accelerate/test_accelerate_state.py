"""AsyncStateCheckpointer in one process: complete or not at all, what fails, what is refused."""

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from scenarios.accelerating import Training, damage, names, no_room, saving, writers

from lightning_dist.accelerate import AsyncStateCheckpointer
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.disk.format import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.scan import verify
from lightning_dist.frameworks.accelerate.async_state.files import Scratch, sweep


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """Where accelerate's files wait."""
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def writer_of(state: AsyncStateCheckpointer) -> int:
    """The writer process of ``state``, which has saved something then."""
    state.save_state()
    state.wait()
    (writer,) = writers()
    return writer


def kill_writer_during_a_save(state: AsyncStateCheckpointer) -> None:
    """The second one."""
    writer = writer_of(state)
    os.kill(writer, signal.SIGSTOP)
    state.save_state()
    os.kill(writer, signal.SIGKILL)


@pytest.mark.slow
def test_stock_accelerate_loads_ours_and_we_load_its_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(tmp_path) as (state, training):
        history = training.train(3)
        ours = state.save_state()
        state.wait()
        assert ours is not None
        assert verify(ours).kind == "folder"
    with Training(tmp_path, seed=5) as training:
        training.accelerator.load_state()  # finds it by itself: nothing else is left beside it
        assert training.tally.seen == history[-1]
        theirs = tmp_path / "theirs"
        training.accelerator.project_configuration.automatic_checkpoint_naming = False
        training.accelerator.save_state(str(theirs))
    with saving(None, seed=6) as (state, training):
        assert state.load_state(theirs) == str(theirs)
        assert training.tally.seen == history[-1]
    assert "it cannot be verified" in caplog.text


def test_nothing_is_left_in_memory_and_the_metrics_say_what_it_cost(
    tmp_path: Path, staging: Path
) -> None:
    with saving(tmp_path, staging_dir=staging) as (state, _):
        target = state.save_state(step=17)
        state.wait()
        assert os.listdir(staging) == []
        assert state.last_committed is not None
        assert (state.last_committed.target, state.last_committed.origin.step) == (target, 17)
        metrics = state.metrics
        assert (metrics.saves, metrics.failed, metrics.in_flight) == (1, 0, 0)
        assert 0 < metrics.queue_ms < metrics.blocking_ms
        assert metrics.bytes == verify(str(target)).nbytes > 0


def test_an_explicit_folder_is_replaced_as_a_whole_with_what_hooks_wrote(tmp_path: Path) -> None:
    """Also folders inside, as diffusers' hooks write them."""
    with saving(None) as (state, training):

        def write(models: Any, weights: Any, output_dir: str) -> None:
            nested = Path(output_dir, "unet", "part")
            nested.mkdir(parents=True)
            (nested / f"{training.tally.seen}.json").write_text("{}")

        training.accelerator.register_save_state_pre_hook(write)
        state.save_state(tmp_path / "here")
        training.train(1)
        state.save_state(tmp_path / "here")
        seen = training.tally.seen
        training.train(1)
        state.load_state(tmp_path / "here")
        assert training.tally.seen == seen
        assert os.listdir(tmp_path / "here" / "unet" / "part") == [f"{seen}.json"]
        damage(tmp_path / "here" / "manifest.json")
        with pytest.raises(CorruptCheckpointError, match=r"here is not a complete checkpoint"):
            state.load_state(tmp_path / "here")


def test_a_busy_writer_makes_a_save_skip_and_numbers_stay_dense(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(tmp_path, on_busy="skip") as (state, _):
        writer = writer_of(state)
        os.kill(writer, signal.SIGSTOP)
        assert state.save_state() is not None
        assert state.save_state() is None
        os.kill(writer, signal.SIGCONT)
        state.wait()
        assert Path(state.save_state() or "").name == "checkpoint_2"
        assert state.metrics.skipped == 1
    assert "on_busy='skip'" in caplog.text


def test_sync_returns_when_it_is_durable(tmp_path: Path) -> None:
    with saving(tmp_path, snapshot="sync", verify="always") as (state, _):
        assert verify(str(state.save_state())).kind == "folder"


def test_closing_reports_waits_and_ends_everything(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with Training(tmp_path) as training:
        state = AsyncStateCheckpointer(training.accelerator, max_in_flight=2)
        for _ in range(3):
            state.save_state()
        state.close()
        state.close()
        assert names(tmp_path) == [f"checkpoint_{n}" for n in range(3)]
        assert writers() == []
        assert set(threading.enumerate()) <= threads
        lock = own(str(tmp_path / "checkpoints"), patience=0)
        assert lock is not None
        lock.release()
        for call in (state.save_state, state.load_state, state.wait):
            with pytest.raises(ValueError, match="closed"):
                call()


def test_a_folder_without_a_whole_checkpoint_is_no_reason_to_start_afresh(tmp_path: Path) -> None:
    with saving(tmp_path) as (state, _):
        with pytest.raises(FileNotFoundError):
            state.load_state()
        target = state.save_state()
        state.wait()
        damage(Path(str(target), "optimizer.bin"))
        with pytest.raises(CheckpointError, match=r"checkpoint_0: optimizer.bin has changed"):
            state.load_state()
        Path(str(target), "optimizer.bin").unlink()
        with pytest.raises(CorruptCheckpointError, match=r"optimizer.bin is missing"):
            state.load_state(target)


@pytest.mark.exhaustive
def test_another_number_of_objects_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with saving(tmp_path) as (state, training):
        training.train(1)
        state.save_state()
    with saving(tmp_path, seed=5) as (state, training):
        training.accelerator.register_for_checkpointing(training.tally)
        before = [p.detach().clone() for p in training.model.parameters()]
        with pytest.raises(ValueError, match=r"holds 1 objects .* has 2"):
            state.load_state()
        assert all(map(torch.equal, before, training.model.parameters()))


def test_it_is_silent_on_import() -> None:
    assert logging.getLogger("lightning_dist").handlers == []


@pytest.mark.slow
def test_a_dead_writer_is_raised_once_and_replaced(tmp_path: Path, staging: Path) -> None:
    """By the next call, which may be the one that closes."""
    with Training(tmp_path) as training:
        state = AsyncStateCheckpointer(training.accelerator, staging_dir=staging)
        for number, call in ((1, state.wait), (3, state.close)):
            kill_writer_during_a_save(state)
            says = f"checkpoint_{number} of step {number} was not written: the checkpoint writer"
            with pytest.raises(CheckpointError, match=says):
                call()
            call()
        assert names(tmp_path) == ["checkpoint_0", "checkpoint_2"]
        assert os.listdir(staging) == []


@pytest.mark.parametrize("on_error", ["raise", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_full_memory_folder_costs_one_checkpoint(
    tmp_path: Path, staging: Path, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(tmp_path, on_error=on_error, staging_dir=staging) as (state, _):
        writer_of(state)  # has been started, and has no limit
        with no_room(1000):
            if on_error == "raise":
                with pytest.raises(CheckpointError, match="Rank 0 could not write its files"):
                    state.save_state()
            else:
                assert state.save_state() is None
        assert os.listdir(staging) == []
        assert Path(state.save_state() or "").name == "checkpoint_1"
        state.wait()
        assert state.metrics.failed == 1
    assert ("could not write its files" in caplog.text) == (on_error == "warn")


@pytest.mark.slow
def test_a_save_that_never_reaches_the_writer_leaves_nothing_in_memory(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any, **__: Any) -> str:
        raise CheckpointError("an earlier save is stuck")

    with saving(tmp_path, staging_dir=staging) as (state, _):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "save_files", cannot)
            with pytest.raises(CheckpointError, match="is stuck"):
                state.save_state()
        assert os.listdir(staging) == []
        assert state.save_state() is not None


def test_a_failure_is_a_warning_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(tmp_path, on_error="warn") as (state, _), no_room(500, pid=writer_of(state)):
        state.save_state()
        state.wait()
        state.wait()
    assert caplog.text.count("checkpoint_1 of step 1 was not written") == 1
    assert names(tmp_path) == ["checkpoint_0"]


def test_an_error_in_the_training_is_not_replaced_by_one_of_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train_and_fail() -> None:
        with saving(tmp_path) as (state, _):
            kill_writer_during_a_save(state)
            raise KeyError

    with pytest.raises(KeyError):
        train_and_fail()
    assert caplog.text.count("checkpoint_1 of step 1 was not written") == 1


def test_what_a_killed_process_left_in_memory_is_removed_once_nobody_needs_it(
    tmp_path: Path,
) -> None:
    child = os.fork()
    if child == 0:
        Scratch(str(tmp_path))
        os._exit(0)
    os.waitpid(child, 0)
    (dead,) = tmp_path.iterdir()
    living = Scratch(str(tmp_path))
    sweep(str(tmp_path))
    assert dead.exists(), "it might be one that is being made"
    (dead / "handed_over").write_text("/here")
    sweep(str(tmp_path), released="/there")
    assert dead.exists(), "a writer may still read it"
    living.hand_over("/here")
    sweep(str(tmp_path), released="/here")
    assert os.listdir(tmp_path) == [Path(living.path).name]
    living.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"snapshot": "overlap"}, "accelerate writes its files at once"),
        ({"staging_dir": "/nowhere/at/all"}, "make it"),
        ({"staging_dir": "s3://bucket"}, "local or mounted folder"),
        ({"on_busy": "never"}, "on_busy must be 'wait'"),
    ],
)
def test_settings_that_cannot_take_effect(arguments: dict[str, Any], remedy: str) -> None:
    with Training(None) as training, pytest.raises(ValueError, match=remedy):
        AsyncStateCheckpointer(training.accelerator, **arguments)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_accelerators_that_write_together(kind: str) -> None:
    with Training(None) as training:
        training.accelerator.state.distributed_type = kind
        with pytest.raises(ValueError, match=r"use accelerator\.save_state there"):
            AsyncStateCheckpointer(training.accelerator)


def test_folders_of_each_node(tmp_path: Path) -> None:
    training = Training(tmp_path, save_on_each_node=True)
    with training, pytest.raises(ValueError, match="save_on_each_node"):
        AsyncStateCheckpointer(training.accelerator)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with saving(None) as (state, _):
        with pytest.raises(ValueError, match="save_state needs output_dir="):
            state.save_state()
        with pytest.raises(ValueError, match="load_state needs input_dir="):
            state.load_state()
        for call in (state.save_state, state.load_state):
            with pytest.raises(ValueError, match="copy the finished folder"):
                call("s3://bucket/checkpoint")
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="is a file"):
            state.save_state(tmp_path / "file")
        (tmp_path / "empty").mkdir()
        with pytest.raises(CorruptCheckpointError, match="empty"):
            state.load_state(tmp_path / "empty")
        assert state.save_state(tmp_path / "empty") == str(tmp_path / "empty")
