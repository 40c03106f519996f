"""The same run with Lightning's ModelCheckpoint and with ours leaves the same files and books."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from checkpoint_runs import (
    Between,
    Net,
    books,
    fit,
    listing,
    require_same,
    without_folder,
)
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncCheckpoint

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
    trainer = fit(ours)
    assert trainer.checkpoint_callback is ours
    assert ours.last_committed is not None
    assert ours.last_committed.target == str(tmp_path / "here-step=6.ckpt")


@pytest.mark.parametrize("arguments", [{"monitor": "score", "save_top_k": 2, "save_last": True}])
def test_each_goes_on_from_the_others_files(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Half of the run with one, half with the other: the books of either, and every weight."""
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


class Saved(L.LightningModule):
    """What load_from_checkpoint needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()
        self.extra = torch.nn.Parameter(torch.zeros(width))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.net(batch.expand(2, 4)).square().mean() + self.extra.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 1))


def test_lightning_alone_loads_it(tmp_path: Path) -> None:
    model = Saved(3)
    ours = AsyncCheckpoint(tmp_path)
    fit(ours, model=model, max_epochs=1)
    loaded = Saved.load_from_checkpoint(ours.best_model_path)
    assert loaded.extra.shape == (3,)
    require_same(loaded.state_dict(), model.state_dict())
    plain = fit(model=Saved(3), ckpt_path=ours.best_model_path, enable_checkpointing=False)
    assert plain.global_step == 4
