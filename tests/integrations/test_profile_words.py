"""The page of a profile, its metadata and its uploads; trainings with nothing to record."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from elastic_runs import Net, fit, make_loader
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from planted import Planted
from torch.distributed.distributed_c10d import Backend, BackendConfig
from typing_extensions import override
from wandb_runs import records

from lightning_dist import CommProfiler
from lightning_dist.integrations.profiler.live import log_summary
from lightning_dist.integrations.profiler.metadata import why_not_in_detail
from lightning_dist.integrations.profiler.models import LocalModel
from lightning_dist.integrations.torch.local.settings import LocalUpdateSettings
from lightning_dist.profiling.analysis.metrics import METRICS
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.analysis.summarize import summarize


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


def model(monkeypatch: pytest.MonkeyPatch, device: str, backend: str, *, devices: int = 1) -> Any:
    """What is asked of a DistributedDataParallel, with torch's own words for its backend."""
    told = str(BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: told)
    return SimpleNamespace(
        device=torch.device(device), is_multi_device_module=devices > 1, process_group=None
    )


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        ("cuda", "nccl"),
        ("cuda:1", "cpu:gloo,cuda:nccl"),
        ("cuda", "cuda:nccl"),
        ("xpu", "xccl"),
    ],
)
def test_it_can(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_in_detail(model(monkeypatch, device, backend)) == ""


@pytest.mark.parametrize(
    ("device", "backend", "devices", "reason"),
    [
        (
            "cuda",
            "gloo",
            1,
            "is timed where NCCL exchanges the gradients, here it is cpu:gloo,cuda:",
        ),
        ("cuda", "cpu:nccl,cuda:gloo", 1, "is timed where NCCL exchanges"),
        ("cuda", "nccl", 2, "on several GPUs of one process"),
        ("mps", "gloo", 1, "the times of work on mps are not measured"),
    ],
)
def test_it_cannot_and_says_why(
    device: str, backend: str, devices: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in why_not_in_detail(model(monkeypatch, device, backend, devices=devices))


@pytest.mark.parametrize(
    ("method", "arguments", "device", "reason"),
    [
        ("local_sgd", {}, "cpu", ""),
        ("streaming", {}, "cpu", "with overlap_steps=3 an exchange is of many steps"),
        ("local_sgd", {"ddp_steps": 4}, "cpu", "the first ddp_steps are those of DDP"),
        ("local_sgd", {}, "cuda", "are timed on CPUs only"),
    ],
)
def test_exchanges_of_local_updates(
    method: Any, arguments: dict[str, Any], device: str, reason: str
) -> None:
    network = SimpleNamespace(device=torch.device(device))
    updates: Any = SimpleNamespace(
        module=torch.nn.Linear(2, 2),
        reducer=SimpleNamespace(network=network),
        schedule=LocalUpdateSettings.check(method, outer_optimizer=None, **arguments),
    )
    found = LocalModel(updates).why_not_in_detail()
    assert reason in found
    assert bool(reason) == bool(found)


ONE = "CommProfiler records nothing: one process exchanges no gradients"


def fit_nothing(folder: Path, profiler: CommProfiler, **settings: Any) -> None:
    defaults = {"strategy": "auto", "max_steps": 2, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        **{
            **defaults,
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": folder,
            "callbacks": [profiler],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )
    trainer.fit(Net(), make_loader())


def test_one_process_is_reported_at_the_start_and_where_the_summary_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # Python shows a warning once
        with pytest.warns(UserWarning, match=f"{ONE}; start several, with strategy="):
            fit_nothing(tmp_path, CommProfiler())
        assert [line.startswith(ONE) for line in capsys.readouterr().out.splitlines()] == [True]
    fit_nothing(tmp_path, CommProfiler(print_summary=False))
    assert ONE not in capsys.readouterr().out
    assert not list(tmp_path.rglob("*"))


def test_one_process_is_reported_outside_of_lightning() -> None:
    with pytest.raises(ValueError, match=r"got Linear; .* one process exchanges no gradients"):
        CommProfiler(torch.nn.Linear(1, 1)).__enter__()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_training_that_is_tried_out_leaves_no_profile(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_nothing(tmp_path, CommProfiler(), strategy=strategy, fast_dev_run=True)
    assert not list(tmp_path.rglob("*"))
    assert "CommProfiler records nothing: fast_dev_run" in capsys.readouterr().out


def test_the_profile_of_an_earlier_training_is_not_logged_again(tmp_path: Path) -> None:
    profiler = CommProfiler(print_summary=False, html=False, trace=False, predict=False)
    fit_nothing(tmp_path, profiler, strategy="ddp")
    assert isinstance(profiler.summary, Summary)
    logger = CSVLogger(tmp_path / "csv", version=0)
    fit_nothing(tmp_path, profiler, logger=logger, log_every_n_steps=1)
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "loss" in text
    assert "comm/" not in text
    assert (profiler.summary, profiler.folder) == (None, None)


OF_RANKS = {"rank0.jsonl", "rank11.jsonl", "torch-trace-rank0-step3.json.gz", "flight-rank1.json"}
REPORTS = {"meta.json", "summary.json", "report.html", "trace.json.gz", "costs.json", "steps.csv"}


@pytest.mark.parametrize(
    ("upload", "wanted"), [("report", REPORTS), ("all", REPORTS | OF_RANKS), ("none", None)]
)
def test_an_artifact_has_what_was_asked_for(
    upload: Any, wanted: set[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (run := tmp_path / "run-0").mkdir()
    for name in REPORTS | OF_RANKS:
        (run / name).write_text(name)
    logger = WandbLogger(offline=True, save_dir=tmp_path, id="profiled")
    trainer: Any = SimpleNamespace(loggers=[logger], global_step=6)
    log_summary(trainer, summarize(Planted().run()), run, upload=upload)
    wandb.finish()
    (log,) = tmp_path.glob("wandb/offline-run-*/run-profiled.wandb")
    artifacts = {each.artifact.name: each.artifact for each in records(log)}
    of_profile = [each for name, each in artifacts.items() if name == "comm-profile-profiled"]
    found = [{entry.path for entry in each.manifest.contents} for each in of_profile]
    assert found == ([] if wanted is None else [wanted])
    assert bool(list(log.parent.glob("files/media/*/comm/*"))) == (wanted is not None)


def test_an_upload_that_is_none_of_them_is_refused() -> None:
    with pytest.raises(ValueError, match="upload must be 'report', 'all' or 'none'; got 'lines'"):
        CommProfiler(upload="lines")  # type: ignore[arg-type]


def test_lines_cannot_be_uploaded_without_a_run_of_wandb(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="upload='all' needs a WandbLogger"):
        fit(tmp_path, callbacks=[CommProfiler(upload="all")], strategy="ddp", logger=False)
    with pytest.raises(ValueError, match="upload='all' needs a WandbLogger"):
        CommProfiler(torch.nn.Linear(1, 1), upload="all")
    assert not list(tmp_path.glob("**/run-*"))
