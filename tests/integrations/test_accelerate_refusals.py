"""What AsyncStateCheckpointer refuses, and what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from scenarios.accelerating import Training

from lightning_dist.accelerate import AsyncStateCheckpointer
from lightning_dist.checkpoint.disk.errors import CorruptCheckpointError


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"snapshot": "overlap"}, "use 'blocking'"),
        ({"staging_dir": "/nowhere/at/all"}, "make it"),
        ({"staging_dir": "s3://bucket"}, "local or mounted folder"),
        ({"on_busy": "never"}, "on_busy must be one of"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"snapshot": "sync", "on_busy": "skip"}, "cannot take effect"),
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
    with Training(None) as training, AsyncStateCheckpointer(training.accelerator) as state:
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
