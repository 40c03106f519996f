"""Small fits in the process of a test, and what can be said of the files they leave."""

import os
import resource
import signal
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
    """Calls the function of a step after its checkpoint was taken, before the next step.

    And has a digest of the module and of its optimizers after every step.
    """

    def __init__(self, actions: Mapping[int, Callable[[], None]]) -> None:
        self.actions = dict(actions)
        self.digests: dict[int, bytes] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.actions.get(trainer.global_step, lambda: None)()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        states = (state for each in trainer.optimizers for state in each.state.values())
        tensors = [each for state in states for each in state.values() if isinstance(each, Tensor)]
        self.digests[trainer.global_step] = digest(module) + b"".join(map(_bytes, tensors))


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
    return b"".join(map(_bytes, module.state_dict().values()))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


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


def checkpointer_of(owner: Any) -> Any:
    """That of a callback or of AsyncTorchCheckpointIO, while a fit is under way."""
    if isinstance(owner, AsyncCheckpoint):
        return owner._session.checkpointer
    return owner._saves.checkpointer


def writer_pid(owner: Any) -> int:
    """The process that writes."""
    return int(checkpointer_of(owner)._queue.writer.pid)


class Faults:
    """Breaks what is below a checkpoint callback or AsyncTorchCheckpointIO, and mends it."""

    def __init__(self, callback: Any, folder: Path) -> None:
        self.callback, self.folder = callback, folder
        self.aside = folder.with_name("aside")

    def short_of_space(self) -> None:
        """No file of the writer may be longer than 1 kB: the kernel refuses in mid-file."""
        self.limit(1000)

    def space_again(self) -> None:
        self.limit(resource.RLIM_INFINITY)

    def limit(self, nbytes: int) -> None:
        checkpointer_of(self.callback).wait()
        limits = (nbytes, resource.RLIM_INFINITY)
        resource.prlimit(writer_pid(self.callback), resource.RLIMIT_FSIZE, limits)

    def replace_folder(self) -> None:
        """A file has the folder's name."""
        self.callback.wait()
        self.folder.rename(self.aside)
        self.folder.write_text("not a folder")

    def put_folder_back(self) -> None:
        self.callback.wait()
        self.folder.unlink()
        self.aside.rename(self.folder)

    def stop_writer(self) -> None:
        self.callback.wait()
        self._stopped = writer_pid(self.callback)
        os.kill(self._stopped, signal.SIGSTOP)

    def let_writer_go_on(self) -> None:
        """The stopped one, which the training may have left."""
        os.kill(self._stopped, signal.SIGCONT)

    def kill_writer(self) -> None:
        os.kill(writer_pid(self.callback), signal.SIGKILL)
        self.callback.wait()
