"""CommProfiler in one process: settings, the page and uploads, trainings with nothing to record;
and a job that loses a rank."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from comm_profiles import busy, require_report_without_a_rank
from elastic_runs import Net, fit, make_loader, quiet_trainer
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from planted import Planted
from processes import torchrun
from torch import nn
from torch.distributed.distributed_c10d import Backend, BackendConfig
from typing_extensions import override
from wandb_runs import records

from lightning_dist import CommProfiler
from lightning_dist.frameworks.comm_profiler import _reason, log_summary
from lightning_dist.profiling.analysis.metrics import METRICS
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.session.models import LocalModel
from lightning_dist.profiling.session.profile_run import ProfileRun, why_not_in_detail
from lightning_dist.settings.local_updates import LocalUpdateSettings


def train(folder: Path, profiler: CommProfiler, **settings: Any) -> None:
    """Two steps in one process, of which there is nothing to record."""
    given = {"max_steps": 2, "enable_checkpointing": False, "callbacks": [profiler], **settings}
    trainer = quiet_trainer(default_root_dir=folder, **given)
    trainer.fit(Net(), make_loader(), make_loader(shuffle=False))


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
    train(
        tmp_path,
        profiler,
        strategy="ddp",
        max_steps=12,
        val_check_interval=4,
        limit_val_batches=1,
        log_every_n_steps=1,
        logger=SlowLogger(tmp_path),
        callbacks=[Slow(), profiler],
    )
    assert profiler.summary is not None
    parts = profiler.summary.breakdown_ms
    assert (parts["between_steps"] or 0) >= 45  # 60 but for steps that follow a validation
    assert (parts["optimizer"] or 0) >= 30
    assert (parts["other"] or 0) < 20  # less than what any callback takes
    assert (profiler.summary.step_ms["median"] or 0) < 300
    between, optimizer, other = (METRICS[name] for name in ("between_steps", "optimizer", "other"))
    assert "callbacks, loggers" in between.meaning
    assert "clipping" in optimizer.meaning
    assert not any(word in other.meaning for word in ("callbacks", "logging", "validation"))
    assert "Validation belongs to no step" in METRICS["step_ms"].meaning


@pytest.mark.parametrize(
    ("device", "backend", "devices", "reason"),
    [
        ("cpu", "gloo", 1, ""),
        ("cuda", "nccl", 1, ""),
        ("cuda:1", "cpu:gloo,cuda:nccl", 1, ""),
        ("cuda", "cuda:nccl", 1, ""),
        ("xpu", "xccl", 1, ""),
        ("cuda", "gloo", 1, "timed where NCCL exchanges the gradients, here it is cpu:gloo,cuda:"),
        ("cuda", "cpu:nccl,cuda:gloo", 1, "is timed where NCCL exchanges"),
        ("cuda", "nccl", 2, "on several GPUs of one process"),
        ("mps", "gloo", 1, "the times of work on mps are not measured"),
    ],
)
def test_what_is_not_recorded_in_detail_has_its_reason(
    device: str, backend: str, devices: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a DistributedDataParallel, with torch's own words for its backend."""
    told = str(BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: told)
    model: Any = SimpleNamespace(
        device=torch.device(device), is_multi_device_module=devices > 1, process_group=None
    )
    found = why_not_in_detail(model)
    assert reason in found
    assert bool(reason) == bool(found)


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
        settings=LocalUpdateSettings(method=method, **arguments),
    )
    found = LocalModel(updates).why_not_in_detail()
    assert reason in found
    assert bool(reason) == bool(found)


ONE = "CommProfiler records nothing: one process exchanges no gradients"


def test_one_process_is_reported_at_the_start_and_where_the_summary_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # Python shows a warning once
        with pytest.warns(UserWarning, match=f"{ONE}; start several, with strategy="):
            train(tmp_path, CommProfiler())
        assert [line.startswith(ONE) for line in capsys.readouterr().out.splitlines()] == [True]
    train(tmp_path, CommProfiler(print_summary=False))
    assert ONE not in capsys.readouterr().out
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_training_that_is_tried_out_leaves_no_profile(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, CommProfiler(), strategy=strategy, fast_dev_run=True)
    assert not list(tmp_path.rglob("*"))
    assert "CommProfiler records nothing: fast_dev_run" in capsys.readouterr().out


def test_the_profile_of_an_earlier_training_is_not_logged_again(tmp_path: Path) -> None:
    profiler = CommProfiler(print_summary=False, html=False, trace=False, predict=False)
    train(tmp_path, profiler, strategy="ddp")
    assert isinstance(profiler.summary, Summary)
    logger = CSVLogger(tmp_path / "csv", version=0)
    train(tmp_path, profiler, logger=logger, log_every_n_steps=1)
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


def test_lines_cannot_be_uploaded_without_a_run_of_wandb(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="upload='all' needs a WandbLogger"):
        fit(tmp_path, callbacks=[CommProfiler(upload="all")], strategy="ddp", logger=False)
    with pytest.raises(ValueError, match="upload='all' needs a WandbLogger"):
        CommProfiler(torch.nn.Linear(1, 1), upload="all")
    assert not list(tmp_path.glob("**/run-*"))


def test_a_rank_tells_what_it_could_not_send() -> None:
    """What is lost of its lines: rank 0 sees only that none came."""
    profiler, lost = CommProfiler(), "lines do not reach rank 0: Connection closed by peer"
    profiler._run = Mock(is_closed=False, reports=False, metadata=Mock(rank=1))
    profiler._run.close.return_value = (lost,)
    with pytest.warns(UserWarning, match=f"CommProfiler, rank 1: {lost}"):
        profiler._close("finished", together=True)


@pytest.mark.parametrize(
    ("has_finished", "asks", "reason"),
    [(False, True, "the training did not end by itself"), (True, False, "predict=False")],
)
def test_why_nothing_is_predicted_is_known_without_looking(
    has_finished: bool, asks: bool, reason: str, tmp_path: Path
) -> None:
    of_rank = Planted(world_size=1).run().ranks[0]  # looked at, it would say "one rank exchanges"
    file = RankFile(tmp_path, rank=0)
    file.write([of_rank.metadata, *of_rank.steps.values()])
    file.close()
    run = ProfileRun.__new__(ProfileRun)
    run.folder, run._has_finished, run._predicts = tmp_path, has_finished, asks
    summary, _ = run.report(html=False, trace=False)
    assert (
        summary.unavailable["predictions"]
        == f"{reason}; `lightning-dist profile whatif DIR` measures"
    )
    assert summary.predictions is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_overhead": "1%"}, "above 0 and at most 1; got '1%'"),
        ({"max_overhead": True}, "got True"),
        ({"error_every_n_steps": 2.5}, "0 for never; got 2.5"),
        ({"torch_profiler": 12}, r"a range of steps, .* got 12"),
        ({"torch_profiler": [3, 4]}, r"got \[3, 4\]"),
        ({"torch_profiler": signal.SIGTERM}, "SIGTERM"),
        ({"torch_profiler": range(5, 3)}, r"has a step, .* got range\(5, 3\)"),
        ({"torch_profiler": range(-3, 3)}, "none below 0"),
        ({"dirpath": 3}, "path of a folder, or None; got 3"),
        ({"dirpath": ""}, "path of a folder, or None; got ''"),
        ({"measure_links": "no"}, "measure_links must be True or False; got 'no'"),
        ({"csv": "x.csv"}, "csv must be True or False; got 'x.csv'"),
        ({"model": 5}, "DistributedDataParallel to profile; got 5"),
        ({"upload": "lines"}, "upload must be 'report', 'all' or 'none'; got 'lines'"),
    ],
)
def test_settings_that_cannot_take_effect_raise(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommProfiler(**setting)


def test_a_model_of_ddp_is_for_a_loop_of_ones_own() -> None:
    with pytest.raises(ValueError, match=r"needs the model; write with CommProfiler\(model\)"):
        CommProfiler().__enter__()
    profiler = CommProfiler(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"got Linear; .* one process exchanges no gradients"):
        profiler.__enter__()
    with pytest.raises(ValueError, match="leave the model out"):
        profiler.on_train_start(SimpleNamespace(), SimpleNamespace())


def test_an_error_is_reported_without_its_source_locations() -> None:
    told = _reason(RuntimeError("us: [/__w/gloo/transport/tcp/pair.cc:553] " + "closed " * 60))
    assert re.fullmatch(r"RuntimeError: us: (closed )+\.\.\.", told)
    assert len(told) <= 220


@pytest.mark.slow
def test_a_lost_rank_costs_no_report(tmp_path: Path, quick_python: list[str]) -> None:
    script = Path(__file__).with_name("profiled_lost.py")
    done = torchrun(script, tmp_path, ranks=2, limit=110, python=quick_python).require_success()
    require_report_without_a_rank(tmp_path, done.output)
