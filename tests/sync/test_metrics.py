"""What loggers get of compression: columns, metrics in ``self.log``, the configuration of a run."""

import csv
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from elastic_runs import fit
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from replicas import of_all
from scenarios.fitting import compressed, make_trainer
from scenarios.world import rank
from threads import of_all as of_threads
from threads import on_threads
from torch import Tensor, nn
from wandb_runs import config
from worlds import Rank

import lightning_dist
from lightning_dist import (
    CommProfiler,
    CompressedDDPStrategy,
    CompressionError,
    ExchangedVolume,
    Int8,
    compress_ddp,
)
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
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
            "comm/intra_bytes": WIRE_BYTES,  # both ranks are on this node
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
    trainer.strategy.teardown()  # as after a validation
    trainer.fit(model)
    rows = rows_with("comm/compression_ratio", tmp_path)
    assert [row["step"] for row in rows] == list(range(8))
    assert {row["comm/wire_bytes"] for row in rows} == {WIRE_BYTES}
    assert [row["comm/total_wire_bytes"] for row in rows] == [WIRE_BYTES * n for n in range(1, 9)]
    assert trainer.strategy.comm_stats()["wire_bytes"] == 4 * WIRE_BYTES, "of one fit"


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


def finish(log: Path) -> dict[str, Any]:
    import wandb

    wandb.finish()
    (path,) = log.glob("wandb/offline-run-*/run-*.wandb")
    return config(path)


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_wandb_gets_codec_topology_and_versions(tmp_path: Path) -> None:
    logger = WandbLogger(offline=True, save_dir=tmp_path)
    strategy = CompressedDDPStrategy(Int8(block_size=128), start_step=2)
    for each in (strategy, FabricStrategy("bf16")):
        assert each.comm_config() == {}, "before the fit nothing is known of the ranks"
    fit(tmp_path, logger=logger, strategy=strategy, max_epochs=1)
    found = finish(tmp_path)["lightning_dist"]
    assert found == strategy.comm_config()
    assert (found["codec"], found["start_step"]) == ("int8:block_size=128", 2)
    assert (found["exchange"], found["topology"]) == ("flat", "1 node x 1 rank")
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["lightning_dist"] == lightning_dist.__version__
    assert found["versions"]["lightning"] == L.__version__


def test_loggers_whose_hyperparameters_stay_are_left_alone(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, logger=logger, strategy=CompressedDDPStrategy("none"), max_epochs=1)
    assert "lightning_dist" not in logger.experiment.hparams


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        (None, {"exchange": "flat", "topology": "4 nodes x 1 rank", "nodes": 4, "world_size": 4}),
        (
            [[0, 1], [2, 3]],
            {"exchange": "hierarchical", "topology": "2 nodes x 2 ranks", "nodes": 2},
        ),
    ],
)
@on_threads(4)
def test_who_exchanges_with_whom(rank: Rank, tree: Any, wanted: dict[str, Any]) -> None:
    """All ranks say the same."""
    of = {"ranks_per_node": 2} if tree else {"ranks_per_node": 1, "hierarchical": False}
    handle = compress_ddp(rank.ddp(nn.Linear(16, 16)), "int4", groups=rank.groups(tree), **of)
    handle.close()
    found = handle.comm_config()
    assert of_threads(rank, found) == [found] * 4
    assert found.items() >= wanted.items()


def test_a_restart_changes_what_the_run_says(tmp_path: Path) -> None:
    """A wandb run goes on with other settings: the newest are shown, and nothing raises."""
    for codec in ("none", "bf16"):
        logger = WandbLogger(offline=True, save_dir=tmp_path / codec, id="same", resume="allow")
        fit(tmp_path / codec, logger=logger, strategy=CompressedDDPStrategy(codec), max_epochs=1)
    assert finish(tmp_path / "none")["lightning_dist"]["codec"] == "bf16"
