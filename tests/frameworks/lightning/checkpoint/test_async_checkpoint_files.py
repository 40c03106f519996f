"""The files of a run and what it goes on from: as with Lightning's ModelCheckpoint, bit for bit."""

import itertools
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    Between,
    Net,
    books,
    fit,
    flip,
    listing,
    make_trainer,
    require_same,
    without_folder,
)
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.base.versions import installed_version, release
from lightning_dist.checkpoint import reading
from lightning_dist.checkpoint.disk import scan
from lightning_dist.checkpoint.disk.folder_owner import LOCK, own
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.frameworks.lightning.checkpoint import resume

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {"save_top_k": -1},
    "none": {"save_top_k": 0},
    "none but the last": {"save_top_k": 0, "save_last": True},
    "none but a link": {"save_top_k": 0, "save_last": "link"},
    "min 1": {"monitor": "score"},
    "min 2": {"monitor": "score", "save_top_k": 2},
    "max 2 and the last": {"monitor": "score", "save_top_k": 2, "mode": "max", "save_last": True},
    "max all": {"monitor": "score", "save_top_k": -1, "mode": "max"},
    "the last": {"save_last": True},
    "a link": {"save_last": "link"},
    "min 1 and a link": {"monitor": "score", "save_last": "link"},
    "no last": {"save_last": False},
    "steps": {"every_n_train_steps": 2, "save_top_k": -1},
    "steps and the last": {"every_n_train_steps": 2, "save_last": True},
    "steps by a metric": {"every_n_train_steps": 1, "monitor": "seen", "save_top_k": 2},
    "steps by a metric of validation": {"every_n_train_steps": 2, "monitor": "score"},
    "always": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "tomorrow": {"train_time_interval": timedelta(days=1), "save_last": True},
    "every second epoch": {"every_n_epochs": 2, "save_last": True},
    "train epoch": {"save_on_train_epoch_end": True, "monitor": "seen", "save_top_k": 2},
    "validation": {"save_on_train_epoch_end": False, "monitor": "score", "save_top_k": 2},
    "one name": {"filename": "model"},
    "one name for all": {"filename": "model", "save_top_k": -1, "every_n_train_steps": 2},
    "one name, no counter": {"filename": "model", "enable_version_counter": False},
    "one name by a metric": {"filename": "m", "monitor": "score", "save_top_k": 2},
    "a folder in the name": {"filename": "sub/{epoch}", "save_top_k": -1},
    "weights": {"save_weights_only": True, "save_last": True},
    "a metric in the name": {"filename": "{epoch:02d}-{score:.1f}", "save_top_k": -1},
    "a metric in the name without its name": {
        "filename": "e{epoch}-s{score:.1f}",
        "auto_insert_metric_name": False,
        "save_top_k": -1,
    },
    "named as the last": {"filename": "last", "save_last": True},
    "named as the last, no counter": {
        "filename": "last",
        "save_last": True,
        "enable_version_counter": False,
    },
    "named as the link, no counter": {
        "filename": "last",
        "save_last": "link",
        "enable_version_counter": False,
    },
}


def tree(folder: Path) -> list[str]:
    return sorted(
        f"{path.relative_to(folder)}{' -> ' + str(path.readlink()) if path.is_symlink() else ''}"
        for path in folder.rglob("*")
    )


def content(path: Path, folder: Path) -> Any:
    """Of a file, but for its folder, and `last_model_path`, which ours knows a file earlier."""
    state = torch.load(path, weights_only=True)
    for callback in state.get("callbacks", {}).values():
        del callback["last_model_path"]
    return without_folder(state, str(folder))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_run_leaves_the_same(name: str, tmp_path: Path) -> None:
    stock = ModelCheckpoint(tmp_path / "stock", **SETTINGS[name])
    ours = AsyncCheckpoint(tmp_path / "ours", writer="thread", **SETTINGS[name])
    for callback in (stock, ours):
        fit(callback, max_epochs=4)
    if release(installed_version("lightning")) < (2, 6) and name == "named as the link, no counter":
        # Which links the file to itself, and it is lost.
        assert tree(tmp_path / "stock") == ["last.ckpt -> last.ckpt"]
        assert tree(tmp_path / "ours") == ["last.ckpt"]
        return
    assert tree(tmp_path / "ours") == tree(tmp_path / "stock")
    require_same(books(ours), books(stock))
    assert ours.state_key == stock.state_key
    for path in (tmp_path / "stock").rglob("*.ckpt"):
        same = tmp_path / "ours" / path.relative_to(tmp_path / "stock")
        expected = content(path, tmp_path / "stock")
        require_same(content(same, tmp_path / "ours"), expected, path.name)


def test_folder_and_name_by_position_and_the_attributes_of_stock(tmp_path: Path) -> None:
    ours = AsyncCheckpoint(tmp_path, "here-{step}", "score")
    stock = ModelCheckpoint(tmp_path, "here-{step}", "score")
    assert isinstance(ours, ModelCheckpoint)
    assert vars(stock).items() <= vars(ours).items()
    assert (ours.state_key, ours.state_dict()) == (stock.state_key, stock.state_dict())
    model = Net(optimizer="sgd")
    trainer = fit(ours, model=model)
    assert trainer.checkpoint_callback is ours
    loaded = Net.load_from_checkpoint(ours.best_model_path)
    assert loaded.optimizer == "sgd"
    require_same(loaded.state_dict(), model.state_dict())
    given = {"ckpt_path": ours.best_model_path, "enable_checkpointing": False}
    again = fit(model=loaded, max_epochs=3, **given)
    assert again.global_step == 9, "Lightning alone goes on from it"
    assert ours.last_committed is not None
    assert ours.last_committed.target == str(tmp_path / "here-step=6.ckpt")


def test_each_goes_on_from_the_others_files(tmp_path: Path) -> None:
    """Half of the run with one, half with the other: the books of either, and every weight."""
    arguments: dict[str, Any] = {"monitor": "score", "save_top_k": 2, "save_last": True}
    kinds = (ModelCheckpoint, AsyncCheckpoint)
    left = {}
    for first, second in itertools.product(kinds, kinds):
        folder = tmp_path / f"{first.__name__} {second.__name__}"
        fit(first(folder, **arguments), max_epochs=2)
        steps, callback = Between({}), second(folder, **arguments)
        fit(callback, steps, max_epochs=5, ckpt_path=folder / "last.ckpt")
        state = books(callback)
        for key in ("best_k_models", "best_model_path", "kth_best_model_path"):
            assert "epoch=4" in str(state[key]) or key == "kth_best_model_path"
        left[folder.name] = (listing(folder), state, steps.digests)
    expected = left.pop("ModelCheckpoint ModelCheckpoint")
    assert len(left) == 3
    for found in left.values():
        assert found[0] == expected[0]
        require_same(found[1], expected[1])
        assert found[2] == expected[2]


RESUMED: dict[str, Any] = {"monitor": "seen", "save_top_k": 2, "every_n_train_steps": 2}
"""In mid-epoch too. The least `seen` is that of step 6, of 8."""


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_it_repeats_the_uninterrupted_run(format: Any, tmp_path: Path) -> None:
    for optimizer, name in itertools.product(("adamw", "sgd"), ("best", "last", "path")):
        folder, steps = tmp_path / f"{optimizer} {name}", Between({})
        callback = AsyncCheckpoint(
            folder, "{step}", format=format, writer="thread", save_last=True, **RESUMED
        )
        model = Net(optimizer=optimizer)
        whole = fit(callback, steps, model=model, max_steps=8, max_epochs=-1)
        best = folder / "step=6.ckpt"
        assert callback.best_model_path == str(best)
        assert (folder / "last.ckpt").exists()
        if name == "last":  # as if the run had been killed before
            (folder / "last.ckpt").rename(tmp_path / f"{optimizer} {format} last.ckpt")
        again = Between({})
        path = best if name == "path" else name
        # `best` is known to the callback that made it, as with ModelCheckpoint.
        other = callback if name == "best" else AsyncCheckpoint(folder, "{step}", format=format)
        found = Net(optimizer=optimizer)
        resumed = fit(other, again, model=found, ckpt_path=path, max_steps=8, max_epochs=-1)
        assert str(resumed.ckpt_path) == str(best)
        assert list(again.digests) == [7, 8]
        assert again.digests.items() <= steps.digests.items()
        require_same(dict(found.state_dict()), dict(model.state_dict()))
        require_same(
            resumed.optimizers[0].state_dict()["state"], whole.optimizers[0].state_dict()["state"]
        )


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
    """Of the callback and of AsyncTorchCheckpointIO."""
    fit(callback(tmp_path), max_epochs=1)
    fit(AsyncCheckpoint(tmp_path, "w-{step}", save_weights_only=True), max_epochs=2)
    assert (tmp_path / "w-step=6.ckpt").exists()
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


@pytest.mark.parametrize("is_local", [True, False])
def test_the_last_checkpoint_may_be_one_of_lightning(is_local: bool, tmp_path: Path) -> None:
    """`last` is the newest of ours and of what ModelCheckpoint calls so."""
    folder = str(tmp_path) if is_local else f"memory://last-{os.urandom(4).hex()}"
    fit(callback(folder), max_epochs=1)
    fit(ModelCheckpoint(folder, "stock-{step}", save_last=True), max_epochs=2)
    for epochs, newest in ((3, "last.ckpt"), (4, "step=9.ckpt")):
        trainer = fit(callback(folder), ckpt_path="last", max_epochs=epochs)
        assert trainer.ckpt_path == f"{folder}/{newest}"


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

    monkeypatch.setattr(resume, "own", wait_and_own)
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
    for module in (scan, reading, resume):
        monkeypatch.setattr(module, "verify", lambda path: pytest.fail(f"verified {path}"))
    assert resumed(tmp_path, verify="never") == "last.ckpt"


def test_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(callback(tmp_path), max_epochs=1)
    read: list[str] = []
    for module in (scan, reading, resume):
        verify = module.verify
        monkeypatch.setattr(
            module, "verify", lambda path, v=verify: (read.append(path), v(path))[1]
        )
    assert resumed(tmp_path) == "step=3.ckpt"
    assert [Path(path).name for path in read] == ["step=3.ckpt"]
