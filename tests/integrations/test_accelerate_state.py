"""Saving and loading with accelerate in the background, complete or not at all."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from scenarios.accelerating import Training, damage, names, writer_of, writers

from lightning_dist.accelerate import AsyncStateCheckpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.disk.verify import verify


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """Where accelerate's files wait."""
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def test_stock_accelerate_loads_ours_and_we_load_its_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Training(tmp_path) as training:
        history = training.train(3)
        with AsyncStateCheckpointer(training.accelerator) as state:
            ours = state.save_state()
        assert ours is not None
        assert verify(ours).kind == "folder"
    with Training(tmp_path, seed=5) as training:
        training.accelerator.load_state()  # finds it by itself: nothing else is left beside it
        assert training.tally.seen == history[-1]
        theirs = tmp_path / "theirs"
        training.accelerator.project_configuration.automatic_checkpoint_naming = False
        training.accelerator.save_state(str(theirs))
    with Training(None, seed=6) as training, AsyncStateCheckpointer(training.accelerator) as state:
        assert state.load_state(theirs) == str(theirs)
        assert training.tally.seen == history[-1]
    assert "it cannot be verified" in caplog.text


def test_nothing_is_left_in_memory_and_the_metrics_say_what_it_cost(
    tmp_path: Path, staging: Path
) -> None:
    with (
        Training(tmp_path) as training,
        AsyncStateCheckpointer(training.accelerator, staging_dir=staging) as state,
    ):
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
    with Training(None) as training, AsyncStateCheckpointer(training.accelerator) as state:

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
    with (
        Training(tmp_path) as training,
        AsyncStateCheckpointer(training.accelerator, on_busy="skip") as state,
    ):
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
    options: Any = {"snapshot": "sync", "verify": "always"}
    with (
        Training(tmp_path) as training,
        AsyncStateCheckpointer(training.accelerator, **options) as state,
    ):
        target = state.save_state()
        assert verify(str(target)).kind == "folder"


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
    with Training(tmp_path) as training, AsyncStateCheckpointer(training.accelerator) as state:
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


def test_another_number_of_objects_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with Training(tmp_path) as training, AsyncStateCheckpointer(training.accelerator) as state:
        training.train(1)
        state.save_state()
    with (
        Training(tmp_path, seed=5) as training,
        AsyncStateCheckpointer(training.accelerator) as state,
    ):
        training.accelerator.register_for_checkpointing(training.tally)
        before = [p.detach().clone() for p in training.model.parameters()]
        with pytest.raises(ValueError, match=r"holds 1 objects .* has 2"):
            state.load_state()
        assert all(map(torch.equal, before, training.model.parameters()))


def test_it_is_silent_on_import() -> None:
    assert logging.getLogger("lightning_dist").handlers == []
