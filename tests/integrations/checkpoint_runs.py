"""Small fits in the process of a test, and what can be said of the files they leave."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_dist import AsyncCheckpoint
from lightning_dist.checkpoint.disk.folder_owner import LOCK

WIDTH, BATCHES = 4, 3
SCORES = (3.0, 1.0, float("nan"), 2.0, 0.5)
"""The validation metric of each epoch: neither rising nor falling."""


class Net(L.LightningModule):
    """Learns from what the step number says, so that a run can go on from any step."""

    def __init__(self, *, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters("optimizer")
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, WIDTH))
        self.optimizer = optimizer

    def batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        return torch.randn(5, WIDTH, generator=generator)

    def loss(self) -> Tensor:
        x = self.batch()
        return nn.functional.mse_loss(self.net(x), x.flip(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("seen", float(self.global_step % 5))
        return self.loss()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", SCORES[self.current_epoch % len(SCORES)])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(BATCHES, 1))

    val_dataloader = test_dataloader = train_dataloader


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Between(L.Callback):
    """Calls the function of a step after its checkpoint was taken, before the next step."""

    def __init__(self, actions: Mapping[int, Callable[[], None]]) -> None:
        self.actions = dict(actions)
        self.digests: dict[int, bytes] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.actions.get(trainer.global_step, lambda: None)()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.digests[trainer.global_step] = digest(module)


def make_trainer(*callbacks: L.Callback, **arguments: Any) -> L.Trainer:
    settings = {
        "max_epochs": 2,
        "logger": False,
        "num_sanity_val_steps": 0,
        # Lightning's own default would write to the working directory.
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
    }
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        **{**settings, **arguments},
    )


def fit(
    *callbacks: L.Callback,
    model: L.LightningModule | None = None,
    ckpt_path: Any = None,
    **arguments: Any,
) -> L.Trainer:
    trainer = make_trainer(*callbacks, **arguments)
    trainer.fit(model or Net(), ckpt_path=ckpt_path)
    return trainer


def digest(module: nn.Module) -> bytes:
    """All bytes of parameters and buffers."""
    return b"".join(value.detach().numpy().tobytes() for value in module.state_dict().values())


def listing(folder: Path) -> list[str]:
    """Everything in a folder, however hidden, but for the lock."""
    return sorted(name for name in os.listdir(folder) if name != LOCK) if folder.exists() else []


def books(callback: ModelCheckpoint) -> dict[str, Any]:
    """What users read of a ModelCheckpoint, with paths relative to its folder."""
    state = {**callback.state_dict(), "dirpath": ""}
    return without_folder(state, str(callback.dirpath))


def without_folder(value: Any, folder: str) -> Any:
    if isinstance(value, Mapping):
        return {without_folder(k, folder): without_folder(v, folder) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_folder(v, folder) for v in value]
    return value.replace(folder, "FOLDER") if isinstance(value, str) else value


def require_same(found: Any, expected: Any, where: str = "it") -> None:
    """Two states are equal: names, types, shapes, and every bit of every tensor."""
    assert type(found) is type(expected), f"{where}: {type(found)} for {type(expected)}"
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(_bits(found), _bits(expected)), where
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            require_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            require_same(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, f"{where}: {found!r} for {expected!r}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def whole_checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoints that a reader sees; each of them must load."""
    names = [name for name in listing(folder) if not name.startswith(".")]
    for name in names:
        torch.load(folder / name, weights_only=True)
    return names


def flip(path: Path) -> None:
    """Damage one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def writer_pid(callback: AsyncCheckpoint) -> int:
    """The process that writes, while a fit is under way."""
    assert callback._session is not None
    assert callback._session._checkpointer is not None
    return int(callback._session._checkpointer._delivery.writer.pid)
