"""Files of a profile that wandb gets: those the user has asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elastic_runs import fit
from lightning.pytorch.loggers import WandbLogger
from planted import Planted
from wandb_runs import records

from lightning_dist import CommProfiler
from lightning_dist.integrations.profiler.live import log_summary
from lightning_dist.profiling.analysis.summarize import summarize

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
