"""The table for spreadsheets says what was planted, and what the summary says."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest
from planted import Planted, replace

from lightning_dist.profiling.analysis.parts import PARTS
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.files import STEP_COLUMNS, write_csv
from lightning_dist.profiling.run import RankRun, Run


def table(folder: Path, run: Run) -> list[dict[str, str]]:
    write_csv(folder / "steps.csv", run, summarize(run))
    assert {path.name for path in folder.iterdir()} == {"steps.csv"}
    with (folder / "steps.csv").open(newline="") as steps:
        return list(csv.DictReader(steps))


def test_a_row_for_every_step_and_rank(tmp_path: Path) -> None:
    steps = table(tmp_path, Planted(late={1: 30}, shift={1: 500}).run())
    assert [(row["step"], row["rank"], row["host"]) for row in steps] == [
        (str(step), str(rank), host)
        for step in range(6)
        for rank, host in enumerate(("host-a", "host-b"))
    ]
    assert [row["in_summary"] for row in steps] == ["0"] * 4 + ["1"] * 8
    assert float(steps[0]["begin_ms"]) == float(steps[1]["begin_ms"]) == 0.0
    assert float(steps[2]["begin_ms"]) == float(steps[0]["step_ms"])
    for row in steps:
        parts = sum(float(row[f"{name}_ms"]) for name in PARTS)
        assert parts == pytest.approx(float(row["step_ms"]))
        assert float(row["forward_ms"]) == 20 + 30 * int(row["rank"])
        assert float(row["between_steps_ms"]) == 2


def test_the_table_is_of_the_summary(tmp_path: Path) -> None:
    run = Planted(late={1: 30}, slow_steps={3: 2.0}).run()
    summary = summarize(run)
    steps = table(tmp_path, run)
    counted = [row for row in steps if row["in_summary"] == "1"]
    for name, expected in (
        ("step_ms", summary.step_ms["mean"]),
        ("exposed_ms", summary.exposed_ms),
        ("hidden_ms", summary.hidden_ms),
        *((f"{name}_ms", summary.breakdown_ms[name]) for name in PARTS),
    ):
        assert mean(float(row[name]) for row in counted) == pytest.approx(expected), name


def test_what_was_not_recorded_is_empty(tmp_path: Path) -> None:
    run = Planted().run()
    of_one = run.ranks[1]
    coarse = {
        step: replace(record, detailed=False, buckets=(), spans=())
        for step, record in of_one.steps.items()
        if step < 5
    }
    steps = table(tmp_path, Run({0: run.ranks[0], 1: replace(of_one, steps=coarse)}))
    rows = [row for row in steps if row["rank"] == "1"]
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert {row[f"{name}_ms"] for row in rows for name in PARTS} == {""}
    assert {row["hidden_ms"] for row in rows} == {""}
    assert "" not in {row["step_ms"] for row in rows}
    assert "" not in {row["exposed_transfer_ms"] for row in steps if row["rank"] == "0"}
    assert {row["exposed_wait_ms"] for row in steps if row["rank"] == "0"} == {""}


def test_what_was_not_measured_is_no_zero(tmp_path: Path) -> None:
    steps = table(tmp_path, Planted(codec="ddp", encode=0, decode=0).run())
    assert {row["exposed_codec_ms"] for row in steps} == {""}
    assert {row["exposed_wait_ms"] for row in steps} == {"0.0"}
    alone = table(tmp_path, Run({0: Planted(late={1: 50}).run().ranks[0]}))
    assert {row["exposed_wait_ms"] for row in alone} == {""}
    blind = table(tmp_path, Planted(buckets=0).run())
    unseen = (
        "exposed_wait",
        "exposed_transfer",
        "exposed_codec",
        "exposed_other",
        "exposed",
        "hidden",
        "exchange",
    )
    assert {row[f"{name}_ms"] for row in blind for name in unseen} == {""}


def test_columns_of_times_have_units() -> None:
    named = {*STEP_COLUMNS} - {"step", "rank", "host", "in_summary"}
    assert {name.rsplit("_", 1)[-1] for name in named} == {"ms"}


def test_names_that_would_break_a_row_do_not(tmp_path: Path) -> None:
    run = Planted(world_size=1, steps=3, hosts=['a,"b"\nc']).run()
    steps = table(tmp_path, run)
    assert {row["host"] for row in steps} == {'a,"b"\nc'}


def test_nothing_recorded_is_a_table_without_rows(tmp_path: Path) -> None:
    about = Planted(steps=0).run().ranks[0].metadata
    assert table(tmp_path, Run({0: RankRun(about, {})})) == []
