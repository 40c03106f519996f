"""The page explains the parts of a step as they are taken."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
from elastic_runs import Net, make_loader
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_dist import CommProfiler
from lightning_dist.profiling.analysis.metrics import METRICS


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Slow(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        busy(0.02)

    def on_before_optimizer_step(self, *_: Any) -> None:
        busy(0.03)

    def on_validation_start(self, *_: Any) -> None:
        busy(0.3)


class SlowLogger(CSVLogger):
    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        busy(0.04)
        super().log_metrics(metrics, step)


def test_callbacks_and_loggers_are_in_data_and_validation_is_in_no_step(tmp_path: Path) -> None:
    profiler = CommProfiler(
        dirpath=tmp_path, max_overhead=1, html=False, trace=False, print_summary=False
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="ddp",
        max_steps=12,
        val_check_interval=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=SlowLogger(tmp_path),
        callbacks=[Slow(), profiler],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Net(), make_loader(), make_loader(shuffle=False))
    assert profiler.summary is not None
    parts = profiler.summary.breakdown_ms
    assert (parts["between_steps"] or 0) >= 45  # 60 but for steps that follow a validation
    assert (parts["optimizer"] or 0) >= 30
    assert (parts["other"] or 0) < 15  # less than what any callback takes, also on a busy machine
    assert (profiler.summary.step_ms["median"] or 0) < 300
    between, optimizer, other = (METRICS[name] for name in ("between_steps", "optimizer", "other"))
    assert "callbacks, loggers" in between.meaning
    assert "clipping" in optimizer.meaning
    assert not any(word in other.meaning for word in ("callbacks", "logging", "validation"))
    assert "Validation belongs to no step" in METRICS["step_ms"].meaning
