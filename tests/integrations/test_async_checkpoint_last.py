"""What ``ckpt_path="last"`` finds, and what it does not take."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import Between, Net, fit, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint import reading
from lightning_dist.checkpoint.disk import scan
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.folder_owner import LOCK, own
from lightning_dist.integrations.lightning.checkpoint import find_last, resume


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def callback(folder: Any, **arguments: Any) -> AsyncCheckpoint:
    arguments = {"save_top_k": -1, "writer": "thread", **arguments}
    return AsyncCheckpoint(folder, "{step}", **arguments)


def resumed(folder: Any, **arguments: Any) -> str:
    trainer = fit(callback(folder, **arguments), ckpt_path="last", max_epochs=4)
    return Path(str(trainer.ckpt_path)).name


def test_everything_is_damaged(tmp_path: Path) -> None:
    fit(callback(tmp_path), max_epochs=2)
    for step in (3, 6):
        flip(tmp_path / f"step={step}.ckpt")
    steps = Between({})
    with pytest.raises(CheckpointError, match="None of the checkpoints in") as error:
        fit(callback(tmp_path), steps, ckpt_path="last")
    for step in (3, 6):
        assert str(tmp_path / f"step={step}.ckpt") in str(error.value)
    assert steps.digests == {}
    own(str(tmp_path)).release()  # nobody has kept it
    for step in (3, 6):
        os.truncate(tmp_path / f"step={step}.ckpt", 100)  # headers show that
    with pytest.raises(CheckpointError, match="None of the checkpoints in"):
        fit(callback(tmp_path), steps, ckpt_path="last")


@pytest.mark.parametrize(("save_last", "newest"), [(True, "last.pt"), (None, "step=3.pt")])
def test_another_extension(tmp_path: Path, save_last: bool | None, newest: str) -> None:
    class Renamed(AsyncCheckpoint):
        FILE_EXTENSION = ".pt"

    for epochs in (1, 2):
        saves = Renamed(tmp_path, "{step}", save_top_k=-1, save_last=save_last, writer="thread")
        trainer = fit(saves, ckpt_path="last", max_epochs=epochs)
    assert Path(str(trainer.ckpt_path)).name == newest
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt"}


def test_weights_alone_are_passed_over(tmp_path: Path) -> None:
    fit(callback(tmp_path), max_epochs=1)
    fit(AsyncCheckpoint(tmp_path, "w-{step}", save_weights_only=True), max_epochs=2)
    assert (tmp_path / "w-step=6.ckpt").exists()
    assert resumed(tmp_path) == "step=3.ckpt"


def test_weights_alone_of_the_checkpoint_io_are_passed_over(tmp_path: Path) -> None:
    fit(callback(tmp_path), max_epochs=1)
    trainer = make_trainer(plugins=[AsyncTorchCheckpointIO(snapshot="sync")], max_epochs=2)
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.strategy.checkpoint_io.teardown()
    assert resumed(tmp_path) == "step=3.ckpt"


def test_a_damaged_copy_called_last(tmp_path: Path) -> None:
    fit(callback(tmp_path, save_last=True), max_epochs=1)
    (tmp_path / "last.ckpt").unlink()
    shutil.copy(tmp_path / "step=3.ckpt", tmp_path / "last.ckpt")
    flip(tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match="Skipping a damaged checkpoint") as warned:
        assert resumed(tmp_path) == "step=3.ckpt"
    assert any("last.ckpt" in str(each.message) for each in warned)


@pytest.mark.parametrize("format", ["single", "sharded"])
@pytest.mark.parametrize("save_last", [None, True])
def test_an_object_store(format: Any, save_last: Any) -> None:
    folder = f"memory://last-{os.urandom(4).hex()}"
    fit(callback(folder, format=format, save_last=save_last), max_epochs=1)
    steps = Between({})
    again = callback(folder, format=format, save_last=save_last)
    trainer = fit(again, steps, ckpt_path="last", max_epochs=2)
    assert list(steps.digests) == [4, 5, 6]
    name = "last.ckpt" if save_last else "step=3.ckpt"
    assert trainer.ckpt_path == f"{folder}/{name}"


def test_the_last_one_of_lightning_on_an_object_store() -> None:
    folder = f"memory://last-{os.urandom(4).hex()}"
    fit(callback(folder), max_epochs=1)
    fit(ModelCheckpoint(folder, "stock-{step}", save_last=True), max_epochs=2)
    trainer = fit(callback(folder), ckpt_path="last", max_epochs=3)
    assert trainer.ckpt_path == f"{folder}/last.ckpt"


def test_the_folder_is_at_rest_before_anything_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the writer of a dead trainer had finished while this one waits for it."""
    folder, aside = tmp_path / "here", tmp_path / "step=6.ckpt"
    fit(callback(folder), max_epochs=2)
    (folder / aside.name).rename(aside)
    (folder / LOCK).touch()  # which the dead one could not remove
    held: list[Any] = []

    def wait_and_own(path: str) -> Any:
        if aside.exists():
            aside.rename(folder / aside.name)
        held.append(own(path))
        return held[-1]

    monkeypatch.setattr(find_last, "own", wait_and_own)
    assert resumed(folder) == "step=6.ckpt"
    assert len(held) == 1
    assert held[0].owners == 0


def test_a_folder_without_a_lock_is_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(AsyncCheckpoint(tmp_path / "none"))
    assert trainer.checkpoint_callback._find_last_checkpoints(trainer) == set()
    assert not (tmp_path / "none").exists()


def test_a_fit_that_never_begins_gives_the_folder_back(tmp_path: Path) -> None:
    fit(callback(tmp_path), max_epochs=1)
    (tmp_path / LOCK).touch()  # as if it had been killed
    trainer = make_trainer(
        callback(tmp_path), callback(tmp_path / "b", verify="never", monitor="x")
    )
    with pytest.raises(ValueError, match="needs the same verify="):
        trainer.fit(Net(), ckpt_path="last")
    assert trainer.checkpoint_callback._last._lock is None
    assert not (tmp_path / LOCK).exists()


def test_verify_never_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(callback(tmp_path, save_last=True), max_epochs=1)
    for module in (scan, reading, resume, find_last):
        monkeypatch.setattr(module, "verify", lambda path: pytest.fail(f"verified {path}"))
    assert resumed(tmp_path, verify="never") == "last.ckpt"


def test_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(callback(tmp_path), max_epochs=1)
    read: list[str] = []
    for module in (scan, reading, resume, find_last):
        verify = module.verify
        monkeypatch.setattr(
            module, "verify", lambda path, v=verify: (read.append(path), v(path))[1]
        )
    assert resumed(tmp_path) == "step=3.ckpt"
    assert [Path(path).name for path in read] == ["step=3.ckpt"]
