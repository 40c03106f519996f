"""What a run says of its restarts, and loggers that go on where they were."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import FailAt, Fault, fit
from lightning.pytorch.loggers import CSVLogger, WandbLogger


def fail_and_go_on(folder: Path, **settings: Any) -> None:
    with pytest.raises(Fault):
        fit(folder, FailAt("on_after_backward", 7), max_epochs=1, **settings)
    fit(folder, max_epochs=1, **settings)


def test_each_start_says_where_it_goes_on(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        fail_and_go_on(tmp_path)
    messages = dict.fromkeys(record.getMessage() for record in caplog.records)
    said = [message for message in messages if "elastic: " in message]
    assert said[0] == (
        "[lightning_dist] elastic: world 1, fresh start; global batch 4: 1 micro-batch on 1 rank"
    )
    assert said[1] == (
        "[lightning_dist] elastic: world 1 -> 1, resumed at sample 24 (epoch 0, step 6); global "
        "batch 4: 1 micro-batch on 1 rank"
    )
    assert said[2].startswith("[lightning_dist] elastic: 1 restart, ")
    assert said[2].endswith("4 samples recomputed (rank 0: Fault: on_after_backward at step 7)")


def test_a_start_with_nothing_left_to_do_says_so(tmp_path: Path, caplog: Any) -> None:
    fit(tmp_path, max_epochs=1)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(tmp_path, max_epochs=1)
    said = [m for record in caplog.records if "elastic: " in (m := record.getMessage())]
    assert said == [
        "[lightning_dist] elastic: world 1 -> 1, resumed at sample 48 (epoch 1, step 12); global "
        "batch 4: 1 micro-batch on 1 rank; there is nothing left to do"
    ]
    journal = (tmp_path / "ckpt/elastic/rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal] == ["start", "end"]


def test_the_journal_outlives_every_process(tmp_path: Path) -> None:
    fail_and_go_on(tmp_path)
    path = tmp_path / "ckpt" / "elastic" / "rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "end", "start", "caught_up", "end"]
    assert len({line["run_id"] for line in lines if "run_id" in line}) == 1
    assert lines[2]["redone"] == 4
    assert 0 < lines[3]["seconds"] < 60


def test_loggers_get_the_account(tmp_path: Path) -> None:
    fail_and_go_on(tmp_path, logger=CSVLogger(tmp_path))
    (path,) = (tmp_path / "lightning_logs").glob("*/metrics.csv")
    metrics = path.read_text()
    header, *rows = [line.split(",") for line in metrics.splitlines()]
    column = header.index("elastic/samples_recomputed")
    assert {row[column] for row in rows} - {""} == {"4.0"}


def test_the_same_wandb_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    first, second = (WandbLogger(offline=True, save_dir=tmp_path) for _ in range(2))
    settings = {"max_epochs": 1, "strategy": "compressed_ddp_none"}
    ids = []
    with pytest.raises(Fault):
        fit(tmp_path, FailAt("on_after_backward", 7), logger=first, **settings)
    ids.append(first.experiment.id)
    wandb.finish()
    fit(tmp_path, logger=second, **settings)
    ids.append(second.experiment.id)
    wandb.finish()
    start = json.loads((tmp_path / "ckpt/elastic/rank-0.jsonl").read_text().splitlines()[0])
    assert ids == [start["run_id"]] * 2
    # offline-run-<second>-<id>, and a number behind it where two began within one second.
    runs = {path.name.split("-")[3] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert runs == {start["run_id"]}
