"""One way to fit a model on ranks, and what to remember of it."""

import hashlib
import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_dist import CompressedDDPStrategy
from scenarios.world import TIMEOUT, Facts, world_size

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "log_every_n_steps": 1,
}


class Observer(L.Callback):
    """Remembers, for every batch, the loss and a digest of all parameters; and DDP's own facts."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.digests: list[str] = []
        self.ddp: Facts = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(float(outputs["loss"]))
        self.digests.append(digest(pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.strategy.model._get_ddp_logging_data()
        names = ("comm_hook", "rebuilt_bucket_sizes", "static_graph", "gradient_as_bucket_view")
        self.ddp = {name: logged.get(name) for name in names}


class AtStart(L.Callback):
    """Residuals and step count when a fit starts."""

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.residuals = residuals(trainer.strategy)
        self.step = trainer.strategy.sync.reducer.step


def compressed(codec: Any = "int8", **arguments: Any) -> CompressedDDPStrategy:
    """Our strategy; everything is compressed and nothing waits for long."""
    arguments = {"min_compress_numel": 0, "timeout": TIMEOUT, **arguments}
    return CompressedDDPStrategy(codec, **arguments)


def lossless(**arguments: Any) -> CompressedDDPStrategy:
    """Ours without compression: must do what DDP does."""
    return compressed("none", **arguments)


def plain(**arguments: Any) -> DDPStrategy:
    """Lightning's own."""
    return DDPStrategy(timeout=TIMEOUT, **arguments)


def make_trainer(strategy: Any, **arguments: Any) -> L.Trainer:
    callbacks = [*arguments.pop("callbacks", []), Observer()]
    given = {"devices": world_size(), "default_root_dir": os.environ.get("SCENARIO_FOLDER")}
    return L.Trainer(strategy=strategy, callbacks=callbacks, **{**QUIET, **given, **arguments})


def fit(model: L.LightningModule, strategy: Any, *, ckpt_path: Any = None, **arguments: Any) -> Any:
    """Fit and return the facts of it, see :func:`snapshot`."""
    arguments = {"max_epochs": 2, **arguments}
    trainer = make_trainer(strategy, **arguments)
    trainer.fit(model, ckpt_path=ckpt_path)
    return snapshot(trainer)


def snapshot(trainer: L.Trainer) -> Facts:
    """Parameters, residuals, losses, bytes: of this rank, at this moment."""
    observer = next(c for c in trainer.callbacks if isinstance(c, Observer))
    strategy = trainer.strategy
    ours = isinstance(strategy, CompressedDDPStrategy)
    return {
        "parameters": parameters(trainer.lightning_module),
        "losses": observer.losses,
        "digests": observer.digests,
        "ddp": observer.ddp,
        "optimizer_steps": trainer.global_step,
        "stats": dict(strategy.comm_stats()) if ours else None,
        "residuals": residuals(strategy) if ours else None,
    }


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def residuals(strategy: Any) -> dict[str, Tensor]:
    """Copies of this rank's residuals by parameter name."""
    reducer = strategy.sync and strategy.sync.reducer
    if reducer is None:
        return {}
    return {name: reducer.residuals[name].clone() for name in reducer.residuals}


def digest(module: nn.Module) -> str:
    flat = torch.cat([p.detach().reshape(-1).to(torch.float32) for p in module.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def half(**scaler: Any) -> list[MixedPrecision]:
    """16-mixed on the CPU, which ``precision="16-mixed"`` would turn into bf16-mixed."""
    real = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, **scaler})
    return [MixedPrecision("16-mixed", device="cpu", scaler=real)]
