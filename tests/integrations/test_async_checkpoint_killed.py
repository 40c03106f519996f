"""Two trainers and one folder; and a trainer that is killed while its checkpoint is written."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Between, fit, whole_checkpoints
from processes import environment_of

from lightning_dist import AsyncCheckpoint

LIMIT = 60.0
OWNER = Path(__file__).with_name("checkpoint_owner.py")


class Owner:
    """The other trainer, with a checkpoint of its first step."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], LIMIT)
        assert ready, "the trainer did not come to its first checkpoint"
        line = process.stdout.readline()
        assert line, "the trainer ended before its first checkpoint"
        self.pid, self.writer = map(int, line.split())

    def dies(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert self.process.wait(LIMIT) == -signal.SIGKILL

    def disk_goes_on(self) -> None:
        with suppress(ProcessLookupError):  # it has ended by now
            os.kill(self.writer, signal.SIGCONT)


@contextmanager
def owner_of(python: list[str], folder: Path, format: str) -> Iterator[Owner]:
    process = subprocess.Popen(
        [*python, str(OWNER), str(folder), format],
        env=environment_of({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    owner = None
    try:
        owner = Owner(process)
        yield owner
    finally:
        process.kill()
        process.communicate()
        if owner is not None:
            with suppress(ProcessLookupError):
                os.kill(owner.writer, signal.SIGKILL)


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_the_writer_finishes_for_a_dead_trainer(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_python: list[str]
) -> None:
    """And while that one lives, a second one is refused; the next one is not."""

    def callback() -> AsyncCheckpoint:
        return AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1, format=format)

    with owner_of(quick_python, tmp_path, format) as owner:
        with pytest.raises(ValueError, match="Only one trainer may write") as error:
            fit(callback())
        assert str(error.value) == (
            f"No checkpoints can be written to {tmp_path}: Only one trainer may write to a "
            f"checkpoint folder, and {tmp_path} belongs to process {owner.pid} on "
            f"{socket.gethostname()}; wait for it, end it, or give this run another dirpath"
        )
        owner.dies()
        assert _names(tmp_path) == ["last.ckpt", "step=1.ckpt"]
        with monkeypatch.context() as patch:
            # The next trainer waits for the writer of the dead one: only then the disk goes on.
            pause = time.sleep
            patch.setattr(time, "sleep", lambda seconds: (owner.disk_goes_on(), pause(seconds)))
            steps = Between({})
            trainer = fit(callback(), steps, ckpt_path="last")
    assert list(steps.digests) == [3, 4, 5, 6]
    assert Path(str(trainer.ckpt_path)).name in ("last.ckpt", "step=2.ckpt")
    uninterrupted = Between({})
    fit(uninterrupted, enable_checkpointing=False)
    assert all(uninterrupted.digests[step] == value for step, value in steps.digests.items())
    assert "step=1.ckpt" not in _names(tmp_path)
    assert "step=6.ckpt" in _names(tmp_path)
    if format == "single":
        assert whole_checkpoints(tmp_path) == _names(tmp_path)
        assert torch.load(tmp_path / "last.ckpt")["global_step"] == 2


def _names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))
