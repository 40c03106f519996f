"""The first save does not wait for its writer to start, and is as safe as the others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from snapshots import assert_equal, small_state

from lightning_dist import AsyncTorchCheckpointIO
from lightning_dist.checkpoint import writers
from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.reading import load

LIMIT = 30.0


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Writers that start do nothing until something is written here."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setattr(writers, "_BOOT", f"open({str(path)!r}).read()\n{writers._BOOT}")
    yield path
    with suppress(OSError):  # nobody waits any more
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def test_the_first_save_returns_before_its_writer_has_started(tmp_path: Path, gate: Path) -> None:
    io = AsyncTorchCheckpointIO()
    path = tmp_path / "here" / "1.ckpt"
    saved = threading.Thread(target=io.save_checkpoint, args=(small_state(), path), daemon=True)
    saved.start()
    saved.join(LIMIT)
    waits = saved.is_alive()
    gate.write_text("go on")
    saved.join(LIMIT)
    io.teardown()
    assert not waits
    assert_equal(load(str(path)), small_state())


def test_a_trainer_that_is_killed_before_its_writer_has_started_loses_nothing(
    tmp_path: Path, gate: Path
) -> None:
    folder = tmp_path / "here"
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT))
        io = AsyncTorchCheckpointIO()
        io.save_checkpoint(small_state(), folder / "1.ckpt")
        io._saves.checkpointer._delivery._thread.submit(int).result(LIMIT)  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with pytest.raises(ValueError, match="its writer still holds"):
        own(str(folder), patience=0.1)
    gate.write_text("go on")
    lock = own(str(folder), patience=LIMIT)
    assert lock is not None
    lock.release()
    assert_equal(load(f"{folder}/1.ckpt"), small_state())
    assert os.listdir(folder) == ["1.ckpt"]
