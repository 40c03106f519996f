"""One training run of the demo, with everything the demo's table and picture need."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import WandbLogger

import lightning_dist  # noqa: F401  (registers "compressed_ddp")
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT

NETWORK_COUNTERS = Path("/proc/net/dev")
RANKS = 2
VALIDATIONS = 5


class Curves(Callback):
    """Keeps both loss curves, and the time spent in training steps alone."""

    def __init__(self) -> None:
        self.train: list[tuple[int, float]] = []
        self.val: list[tuple[int, float]] = []
        self.seconds = 0.0
        self._began = 0.0

    def on_train_batch_start(self, *_: object) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: object
    ) -> None:
        self.seconds += time.perf_counter() - self._began
        self.train.append((trainer.global_step, float(outputs["loss"])))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.val.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def loopback_bytes() -> int | None:
    """Bytes sent over `lo` since boot, or None where the system keeps no such counter.

    Every strategy is measured by this same counter, none by what it says of itself.
    """
    if not NETWORK_COUNTERS.exists():
        return None
    for line in NETWORK_COUNTERS.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])  # eight receive counters come first
    return None


def counted_by(strategy: object) -> dict[str, float] | None:
    """What the strategy says it sent, where it counts at all (plain DDP does not)."""
    comm_stats = getattr(strategy, "comm_stats", None)
    if comm_stats is None:
        return None
    stats: Mapping[str, Any] = comm_stats()
    return {key: float(stats[key]) for key in ("raw_bytes", "wire_bytes", "ratio")}


def run(strategy: str, *, steps: int, out: Path) -> None:
    """Train on two CPU processes and leave `<out>/<strategy>.json` behind."""
    torch.set_num_threads(1)  # one core per rank: more threads would only fight over two cores
    L.seed_everything(7)
    curves = Curves()
    callbacks: list[Callback] = [curves]
    if sys.stdout.isatty():
        callbacks.append(RichProgressBar(leave=True))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        gradient_clip_val=1.0,
        max_epochs=1,
        limit_train_batches=steps,
        val_check_interval=max(1, steps // VALIDATIONS),
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        callbacks=callbacks,
        logger=WandbLogger(
            project="lightning_dist-demo", name=strategy, save_dir=out, offline=True
        ),
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    model = ByteGPT()
    before = loopback_bytes()
    began = time.perf_counter()
    trainer.fit(model, StdlibBytes())
    fit_seconds = time.perf_counter() - began
    after = loopback_bytes()
    if not trainer.is_global_zero:
        return
    result = {
        "strategy": strategy,
        "ranks": RANKS,
        "steps": trainer.global_step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "val_loss": curves.val[-1][1],
        "loopback_tx_bytes": None if before is None or after is None else after - before,
        "train_seconds": curves.seconds,
        "fit_seconds": fit_seconds,
        "counted_by_strategy": counted_by(trainer.strategy),
        "train_curve": curves.train,
        "val_curve": curves.val,
    }
    (out / f"{strategy}.json").write_text(json.dumps(result))
