"""What AsyncCheckpoint does not take, and what it says; damaged and foreign files."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from checkpoint_runs import Net, digest, fit, flip, listing, make_trainer, whole_checkpoints
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint.disk.errors import CorruptCheckpointError
from lightning_dist.integrations.lightning.checkpoint.supported import require_supported


def message(error: type[Exception], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(error) as caught:
        fit(*arguments, **keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"kind": AsyncTorchCheckpointIO, "snapshot": "overlap"},
            "A CheckpointIO does not know the optimizers, so it cannot copy while training goes "
            "on: snapshot is 'blocking' or 'sync', got 'overlap'; use AsyncCheckpoint",
        ),
        (
            {"kind": AsyncTorchCheckpointIO, "writer": "fork"},
            "writer must be one of 'auto', 'process', 'thread'; got 'fork'",
        ),
        ({"format": "zip"}, "format must be one of 'single', 'sharded'; got 'zip'"),
        (
            {"snapshot": "sync", "on_busy": "skip"},
            "snapshot='sync' waits for every save, so on_busy='skip' cannot take effect; leave one "
            "of them out",
        ),
    ],
)
def test_settings_out_of_range(arguments: dict[str, Any], text: str) -> None:
    kind = arguments.get("kind", AsyncCheckpoint)
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the whole text is compared)
        kind(**{name: value for name, value in arguments.items() if name != "kind"})
    assert str(error.value) == text


def test_arguments_that_nobody_knows() -> None:
    told = r"Unknown setting 'save_top' in AsyncCheckpoint: did you mean 'save_top_k'\?"
    with pytest.raises(ValueError, match=told):
        AsyncCheckpoint(save_top=1)


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_strategies_that_divide_the_model(kind: Any) -> None:
    with pytest.raises(ValueError, match="keeps a part of the model on each rank") as error:
        require_supported(kind(), sharded=True)
    assert str(error.value) == (
        f"AsyncCheckpoint writes what every rank has in full, and {kind.__name__} keeps a part of "
        "the model on each rank and writes it in a format of its own; use ModelCheckpoint with it"
    )


@pytest.mark.parametrize("plugin", [AsyncTorchCheckpointIO, AsyncCheckpointIO])
def test_another_checkpoint_io(plugin: Any, tmp_path: Path) -> None:
    assert message(ValueError, AsyncCheckpoint(tmp_path), plugins=[plugin()]) == (
        f"AsyncCheckpoint writes its checkpoints itself, so {plugin.__name__} cannot take effect; "
        "leave that plugin out, or use ModelCheckpoint with it"
    )
    assert os.listdir(tmp_path) == []


def test_a_trainer_of_pytorch_lightning(tmp_path: Path) -> None:
    """The package need not be there: its trainer is known by the module of its class."""
    trainer = make_trainer()
    foreign = types.new_class("Trainer", (L.Trainer,))
    foreign.__module__ = "pytorch_lightning.trainer.trainer"
    trainer.__class__ = foreign
    with pytest.raises(ValueError, match="comes from 'pytorch_lightning'"):
        AsyncCheckpoint(tmp_path).setup(trainer, Net(), "fit")


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.nn.Linear(6, 5)
        self.more = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_a_checkpoint_of_another_model(format: Any, tmp_path: Path) -> None:
    fit(AsyncCheckpoint(tmp_path, "{step}", format=format), max_epochs=1)
    path, model = tmp_path / "step=3.ckpt", Other()
    before = digest(model)
    callback = AsyncCheckpoint(tmp_path, format=format)
    assert message(ValueError, callback, model=model, ckpt_path=path) == (
        f"{path} is a checkpoint of another model; parameters and buffers only in the model: "
        "more.bias, more.weight; of another shape: net.2.weight (4, 6) for (5, 6), net.2.bias (4,) "
        "for (5,). Give another folder, or the path of a checkpoint of this model, or set "
        "strict_loading=False on the module"
    )
    assert digest(model) == before
    assert listing(tmp_path) == ["step=3.ckpt"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def shard(path: Path) -> Path:
    return next(path.glob("shard-*"))


DAMAGE: dict[str, tuple[Any, Any]] = {
    "a bit": ("single", flip),
    "half a file": ("single", cut),
    "a bit of a shard": ("sharded", lambda path: flip(shard(path))),
    "half a shard": ("sharded", lambda path: cut(shard(path))),
    "no shard": ("sharded", lambda path: shard(path).unlink()),
    "no manifest": ("sharded", lambda path: (path / "manifest.json").unlink()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest two are damaged: the one before them is whole. By its path, damage is an error."""
    format, damage = DAMAGE[name]

    def callback() -> AsyncCheckpoint:
        settings: dict[str, Any] = {"save_top_k": -1, "format": format, "writer": "thread"}
        return AsyncCheckpoint(tmp_path, "{step}", **settings)

    fit(callback(), max_epochs=3)
    for step in (6, 9):
        damage(tmp_path / f"step={step}.ckpt")
    model = Net()
    before = digest(model)
    text = message(
        CorruptCheckpointError, callback(), model=model, ckpt_path=tmp_path / "step=9.ckpt"
    )
    assert text.startswith(f"{tmp_path}/step=9.ckpt is not a complete checkpoint: ")
    assert digest(model) == before
    trainer = fit(callback(), ckpt_path="last", max_epochs=3)
    assert trainer.ckpt_path == str(tmp_path / "step=3.ckpt")
    passed = [text for text in caplog.messages if "Skipping" in text]
    assert any("step=9.ckpt" in text for text in passed)
    assert any("step=6.ckpt" in text for text in passed)


def test_without_verification_a_flipped_bit_is_loaded(tmp_path: Path) -> None:
    """Shows that the test above can fail."""
    settings: dict[str, Any] = {"writer": "thread", "verify": "never"}
    fit(AsyncCheckpoint(tmp_path, "{step}", **settings), max_epochs=1)
    flip(tmp_path / "step=3.ckpt")
    trainer = fit(AsyncCheckpoint(tmp_path, **settings), ckpt_path=tmp_path / "step=3.ckpt")
    assert trainer.global_step == 6


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Also those that look like temporary files, and checkpoints of other runs."""
    names = ["notes.txt", ".hidden", "model.ckpt", ".step=3.ckpt.tmp", "step=1.ckpt.tmp-1", "sub"]
    for name in names[:-1]:
        (tmp_path / name).write_text(name)
    (tmp_path / "sub").mkdir()
    callback = AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    fit(callback, ckpt_path=None)
    fit(AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1), max_epochs=1)
    assert listing(tmp_path) == sorted([*names, "step=3.ckpt", "step=6.ckpt"])
    for name in names[:-1]:
        assert (tmp_path / name).read_text() == name


def test_last_in_a_folder_without_checkpoints(tmp_path: Path) -> None:
    """Lightning starts from the beginning, and warns: the first run of a script that resumes."""
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer = fit(AsyncCheckpoint(tmp_path / "none"), ckpt_path="last")
    assert trainer.global_step == 6
    assert len(whole_checkpoints(tmp_path / "none")) == 1
