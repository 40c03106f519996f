"""What loggers get of compression: columns of the strategy, and metrics in ``self.log``."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from replicas import of_all
from scenarios.fitting import compressed, make_trainer
from scenarios.world import rank
from torch import Tensor, nn

from lightning_dist import CommProfiler, CompressionError, ExchangedVolume
from lightning_dist.profiling.capture.events import ErrorRecord

RAW_BYTES, WIRE_BYTES = 4 * 4096, 4096 + 16 * 2  # one step of `OneMatrix`


class OneMatrix(L.LightningModule):
    """4096 elements in one tensor: 16 blocks of int8. An epoch has 4 steps on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(64, 64, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 64), batch_size=1)


def logger_in(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name=None, version="log")


def rows_with(column: str, folder: Path) -> list[dict[str, float]]:
    """Of what rank 0 has written with `logger_in`."""
    dist.barrier()
    if not (file := folder / "log" / "metrics.csv").exists():
        return []
    rows = csv.DictReader(file.read_text().splitlines())
    found = [{name: float(value) for name, value in row.items() if value} for row in rows]
    return [row for row in found if column in row]


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("every", [0, 1, 2])
def test_loggers_get_the_bytes_of_the_last_step_and_in_total(every: int, tmp_path: Path) -> None:
    """At the trainer's own interval, once, the last step of the fit included; 0 is never."""
    logged = {"logger": logger_in(tmp_path), "log_every_n_steps": every}
    trainer = make_trainer(compressed(), max_epochs=1, **logged)
    trainer.fit(OneMatrix())
    assert trainer.strategy.comm_stats()["steps"] == 4
    assert rows_with("comm/compression_ratio", tmp_path) == [
        {
            "step": step - 1,
            "comm/raw_bytes": RAW_BYTES,
            "comm/wire_bytes": WIRE_BYTES,
            "comm/compression_ratio": pytest.approx(RAW_BYTES / WIRE_BYTES),
            "comm/intra_bytes": WIRE_BYTES,  # both ranks are on this host
            "comm/inter_bytes": 0,
            "comm/total_raw_bytes": step * RAW_BYTES,
            "comm/total_wire_bytes": step * WIRE_BYTES,
        }
        for step in range(1, 5)
        if every and step % every == 0
    ]


@pytest.mark.on_ranks(2)
def test_a_second_fit_logs_its_own_steps_only(tmp_path: Path) -> None:
    model = OneMatrix()
    trainer = make_trainer(compressed(), max_epochs=1, logger=logger_in(tmp_path))
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    rows = rows_with("comm/compression_ratio", tmp_path)
    assert [row["step"] for row in rows] == list(range(8))
    assert {row["comm/wire_bytes"] for row in rows} == {WIRE_BYTES}


class Measured(OneMatrix):
    """Logs its compression with metrics; ranks have batches of their own, and two make a step."""

    def __init__(self, profiler: CommProfiler) -> None:
        super().__init__()
        self.profiler = profiler
        self.volume, self.ratio = ExchangedVolume(), ExchangedVolume(ratio=True)
        self.error = CompressionError()
        self.epochs: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(97 * rank() + batch_idx)
        return super().training_step(batch * torch.randn(64, generator=generator), batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        for metric in (self.volume, self.ratio):
            metric.update(self.trainer.strategy.comm_stats())
        self.error.update(self.profiler.errors)
        logged = {"volume": self.volume, "ratio": self.ratio, "error": self.error}
        for name, metric in logged.items():
            self.log(name, metric, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        before = sum(map(len, self.epochs))
        self.epochs.append([each.relative_l2 for each in [*self.profiler.errors][before:]])


@pytest.mark.on_ranks(2)
def test_logged_values_are_means_over_ranks_and_steps_of_the_epoch(tmp_path: Path) -> None:
    quiet = ("measure_links", "predict", "html", "trace", "print_summary")
    given = {"max_overhead": 1, "error_every_n_steps": 1, **dict.fromkeys(quiet, False)}
    profiler = CommProfiler(dirpath=tmp_path, **given)
    logged = {"logger": logger_in(tmp_path), "log_every_n_steps": 100, "callbacks": [profiler]}
    trainer = make_trainer(compressed(), max_epochs=2, accumulate_grad_batches=2, **logged)
    trainer.fit(module := Measured(profiler))
    stats = trainer.strategy.comm_stats()
    assert stats["steps"] == 4
    sent, raw = (fmean(of_all(stats[name] / 4)) for name in ("wire_bytes", "raw_bytes"))
    rows = rows_with("volume", tmp_path)
    first, second = of_all(module.epochs)
    assert len(rows) == len(first) == len(second) == 2
    assert first != second
    for epoch, row in enumerate(rows):
        assert row["volume"] == pytest.approx(sent)  # every step sends the same
        assert row["ratio"] == pytest.approx(raw / sent)
        assert row["error"] == pytest.approx(fmean([*first[epoch], *second[epoch]]))


def test_volume_of_another_training_counts_from_its_start() -> None:
    metric = ExchangedVolume()
    metric.update({})
    metric.update({"steps": 2, "raw_bytes": 80, "wire_bytes": 20})
    metric.update({"steps": 4, "raw_bytes": 160, "wire_bytes": 60})
    assert metric.compute() == 15
    metric.reset()
    metric.update({"steps": 1, "raw_bytes": 40, "wire_bytes": 7})
    assert metric.compute() == 7
    assert metric(dict(steps=3, raw_bytes=80, wire_bytes=17)) == 5  # of this call alone
    assert metric.compute() == pytest.approx(17 / 3)


def test_a_sample_counts_once() -> None:
    metric, errors = CompressionError(), [ErrorRecord(step, 0, step / 10, None) for step in (2, 4)]
    metric.update(errors[:1])
    metric.update(errors[:1])
    metric.update(errors)
    assert metric.compute() == pytest.approx(0.3)
    metric.reset()
    metric.update(errors)
    assert torch.isnan(metric.compute())
    metric.update([])
    metric.update([ErrorRecord(2, 0, 0.5, None)])
    assert metric.compute() == pytest.approx(0.5)
