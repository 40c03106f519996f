"""Trainings in which CommProfiler has nothing to record: it says so, and writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import Net, make_loader
from lightning.pytorch.loggers import CSVLogger

from lightning_dist import CommProfiler
from lightning_dist.profiling.analysis.parts import Summary

ONE = "CommProfiler records nothing: one process exchanges no gradients"


def fit(folder: Path, profiler: CommProfiler, **settings: Any) -> None:
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
            fit(tmp_path, CommProfiler())
        assert [line.startswith(ONE) for line in capsys.readouterr().out.splitlines()] == [True]
    fit(tmp_path, CommProfiler(print_summary=False))
    assert ONE not in capsys.readouterr().out
    assert not list(tmp_path.rglob("*"))


def test_one_process_is_reported_outside_of_lightning() -> None:
    with pytest.raises(ValueError, match=r"got Linear; .* one process exchanges no gradients"):
        CommProfiler(torch.nn.Linear(1, 1)).__enter__()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_training_that_is_tried_out_leaves_no_profile(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, CommProfiler(), strategy=strategy, fast_dev_run=True)
    assert not list(tmp_path.rglob("*"))
    assert "CommProfiler records nothing: fast_dev_run" in capsys.readouterr().out


def test_the_profile_of_an_earlier_training_is_not_logged_again(tmp_path: Path) -> None:
    profiler = CommProfiler(print_summary=False, html=False, trace=False, predict=False)
    fit(tmp_path, profiler, strategy="ddp")
    assert isinstance(profiler.summary, Summary)
    logger = CSVLogger(tmp_path / "csv", version=0)
    fit(tmp_path, profiler, logger=logger, log_every_n_steps=1)
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "loss" in text
    assert "comm/" not in text
    assert (profiler.summary, profiler.folder) == (None, None)
