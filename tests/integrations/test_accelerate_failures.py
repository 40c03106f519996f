"""Saves of AsyncStateCheckpointer that fail: said once, and the next one works."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from scenarios.accelerating import Training, kill_writer_during_a_save, names, no_room, writer_of

from lightning_dist.accelerate import AsyncStateCheckpointer
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.integrations.accelerate.async_state.scratch import Scratch, sweep


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """Where accelerate's files wait."""
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def test_a_dead_writer_is_raised_once_and_replaced(tmp_path: Path) -> None:
    with Training(tmp_path) as training, AsyncStateCheckpointer(training.accelerator) as state:
        kill_writer_during_a_save(state)
        with pytest.raises(
            CheckpointError, match=r"checkpoint_1 of step 1 was not written: the checkpoint writer"
        ):
            state.wait()
        state.wait()
        state.save_state()
        state.wait()
        assert names(tmp_path) == ["checkpoint_0", "checkpoint_2"]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_memory_folder_costs_one_checkpoint(
    tmp_path: Path, staging: Path, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Training(tmp_path) as training,
        AsyncStateCheckpointer(
            training.accelerator, on_error=on_error, staging_dir=staging
        ) as state,
    ):
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


def test_a_save_that_never_reaches_the_writer_leaves_nothing_in_memory(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any, **__: Any) -> str:
        raise CheckpointError("an earlier save is stuck")

    with (
        Training(tmp_path) as training,
        AsyncStateCheckpointer(training.accelerator, staging_dir=staging) as state,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "save_files", cannot)
            with pytest.raises(CheckpointError, match="is stuck"):
                state.save_state()
        assert os.listdir(staging) == []
        assert state.save_state() is not None


def test_a_failure_is_a_warning_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Training(tmp_path) as training,
        AsyncStateCheckpointer(training.accelerator, on_error="warn") as state,
        no_room(500, pid=writer_of(state)),
    ):
        state.save_state()
        state.wait()
        state.wait()
    assert caplog.text.count("checkpoint_1 of step 1 was not written") == 1
    assert names(tmp_path) == ["checkpoint_0"]


def test_closing_raises_what_was_not_reported_yet(tmp_path: Path, staging: Path) -> None:
    with Training(tmp_path) as training:
        state = AsyncStateCheckpointer(training.accelerator, staging_dir=staging)
        kill_writer_during_a_save(state)
        with pytest.raises(CheckpointError, match="checkpoint_1 of step 1 was not written"):
            state.close()
        state.close()
        assert os.listdir(staging) == []


def test_an_error_in_the_training_is_not_replaced_by_one_of_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train_and_fail() -> None:
        with AsyncStateCheckpointer(training.accelerator) as state:
            kill_writer_during_a_save(state)
            raise KeyError

    with Training(tmp_path) as training, pytest.raises(KeyError):
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
