"""Tables of a report and for spreadsheets, and what two runs differ by."""

import csv
import random
from math import inf, nan
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from planted import MS, Planted, bare, coarse, replace, replaced
from summaries import a_summary

from lightning_dist.profiling.analysis.compare import (
    NAMES,
    Difference,
    Figures,
    compare,
    measured,
    verdict,
)
from lightning_dist.profiling.analysis.metrics import format_value
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS, Traffic
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.analysis.tables import step_table
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, Span
from lightning_dist.profiling.report.files import STEP_COLUMNS, write_csv
from lightning_dist.profiling.report.tables import facts, parts_table, ranks_table
from lightning_dist.profiling.run import RankRun, Run


def test_waiting_is_of_who_waits_and_for_who_is_late() -> None:
    run = Planted(world_size=4, late={1: 30, 3: 70}).run()
    table = step_table(run, [2, 5])
    assert (table.of("waited") == [[70 * MS, 40 * MS, 70 * MS, 0]] * 2).all()
    assert (table.of("late") == [[0, 0, 0, 180 * MS]] * 2).all()
    assert (table.waited_for.sum(axis=0) == table.of("late").sum(axis=0)).all()
    assert (table.waited_for.sum(axis=1) == table.of("waited").sum(axis=0)).all()


def test_what_was_not_recorded_is_not_a_number() -> None:
    run = Planted().run()
    steps = {step: each for step, each in run.ranks[1].steps.items() if step != 3}
    table = step_table(coarse(replaced(run, 1, steps=steps), 1, 4), range(6))
    missing = np.isnan(table.values).all(axis=2)
    assert np.argwhere(missing).tolist() == [[3, 1], [4, 1]]
    assert np.isnan(table.values).any(axis=2).sum() == 2
    assert "rank 1" in table.unknown_wait


def test_numbers_have_three_digits_and_a_unit() -> None:
    for unit, values, texts in (
        ("", (1234.5, 12.34, 1.0, 0.17, 0.00004, 0, nan), "1,234|12.3|1.00|0.170|4e-05|0|n/a"),
        ("ms", (None, 0.5, 411.6), "n/a|0.500 ms|412 ms"),
        ("%", (inf, 0.314, 0.0421, 0.0104, 0, 1), "n/a|31 %|4.2 %|1 %|0 %|100 %"),
        ("B", (16.3e6, 999), "16.3 MB|999 bytes"),
        ("Gbit/s", (0.187, 9.4), "187 Mbit/s|9.40 Gbit/s"),
    ):
        assert [format_value(each, unit) for each in values] == texts.split("|")
    assert format_value(-0.0193, "%", signed=True) == "-1.9 %"
    assert format_value(-1e-9, "%", signed=True) == "+0.0 %"


def test_bytes_are_compared_with_ddp() -> None:
    for raw, words in (
        (0.0, ", compared to 0 bytes of"),
        (8.3e6, "compared to"),
        (3.2e7, "4.0x less"),
    ):
        found = facts(replace(a_summary(), traffic=Traffic(raw, 8e6, 0, 8e6)))
        (sent,) = [each for each in found if each.label == "bytes sent"]
        assert words in sent.detail


def mixed() -> Run:
    """Every second of 36 steps is recorded in detail, and all of those are slower."""
    run = Planted(steps=38, slow_steps=dict.fromkeys(range(0, 38, 2), 2)).run()
    return bare(run, range(1, 38, 2), buckets=(), spans=(), detailed=False)


def test_shares_of_the_parts_are_of_their_sum() -> None:
    summary = summarize(mixed())
    assert (summary.step_ms["mean"], summary.detailed_step_ms) == pytest.approx((130, 160))
    table = parts_table(summary)
    *parts, total = table.rows
    assert sum(float(row[1]) for row in parts) == pytest.approx(160)
    assert sum(float(row[2].removesuffix(" %")) for row in parts) == pytest.approx(100, abs=1)
    assert total == ("detailed step", "160", "100 %", "mean of 18 steps")
    assert table.caption.endswith("the mean of all is 130 ms.")
    exposed, of_all = facts(summary)[:2]
    assert exposed.value == "58 %"
    assert exposed.detail == "93.0 ms of 160 ms, the mean of 18 detailed steps"
    assert of_all.value == "130 ms"
    assert of_all.detail.startswith("mean of 36 steps and 2 ranks; median 130 ms; p95 ")
    assert all(row[2:4] == ("160", "93.0") for row in ranks_table(summary).rows)


def table(folder: Path, run: Run) -> list[dict[str, str]]:
    write_csv(folder / "steps.csv", run, summarize(run))
    assert {path.name for path in folder.iterdir()} == {"steps.csv"}
    with (folder / "steps.csv").open(newline="") as steps:
        return list(csv.DictReader(steps))


def test_a_row_for_every_step_and_rank(tmp_path: Path) -> None:
    steps = table(tmp_path, Planted(late={1: 30}, shift={1: 500}).run())
    assert [(row["step"], row["rank"], row["node"]) for row in steps] == [
        (str(step), str(rank), node)
        for step in range(6)
        for rank, node in enumerate(("node-a", "node-b"))
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
    few = {step: run.ranks[1].steps[step] for step in range(5)}
    steps = table(tmp_path, coarse(replaced(run, 1, steps=few), 1))
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
    unseen = (*EXPOSED, "exposed", "hidden", "exchange")
    assert {row[f"{name}_ms"] for row in blind for name in unseen} == {""}


def test_columns_of_times_have_units() -> None:
    named = {*STEP_COLUMNS} - {"step", "rank", "node", "in_summary"}
    assert {name.rsplit("_", 1)[-1] for name in named} == {"ms"}


def test_names_that_would_break_a_row_do_not(tmp_path: Path) -> None:
    run = Planted(world_size=1, steps=3, nodes=['a,"b"\nc']).run()
    steps = table(tmp_path, run)
    assert {row["node"] for row in steps} == {'a,"b"\nc'}


def test_nothing_recorded_is_a_table_without_rows(tmp_path: Path) -> None:
    about = Planted(steps=0).run().ranks[0].metadata
    assert table(tmp_path, Run({0: RankRun(about, {})})) == []


UNEVEN = {step: 1 + step % 5 / 10 for step in range(42)}
BASE = Planted(steps=42, slow_steps=UNEVEN)


def of(run: Run) -> Figures:
    return measured(run, summarize(run))


def differences(a: Planted | Run, b: Planted | Run) -> dict[str, Difference]:
    runs = [each.run() if isinstance(each, Planted) else each for each in (a, b)]
    found = compare(*map(of, runs))
    assert tuple(each.name for each in found) == NAMES
    return {each.name: each for each in found}


def said(a: Planted, b: Planted) -> str:
    return verdict(list(differences(a, b).values()))


def test_planted_differences_are_found() -> None:
    found = differences(BASE, replace(BASE, forward=30, sent=500_000))
    assert found["forward_ms"].a == 20
    assert found["forward_ms"].b == 30
    assert found["sent_mb"].difference == -2
    real = {name for name, each in found.items() if each.is_explained is False}
    assert real == {"step_ms", "forward_ms", "sent_mb", "all_steps_ms"}
    assert found["step_ms"].difference == 10


def test_bytes_of_fsdp_are_those_of_the_report() -> None:
    all_gather = "exchange", OF_NO_BUCKET, 1, 9, "all_gather", "flat", 16_000_000
    run = bare(BASE.run(), spans=[Span(*all_gather)])
    summary, found = summarize(run), differences(BASE, run)
    assert summary.traffic is not None
    assert found["sent_mb"].b == summary.traffic.wire_bytes / 1e6 == 20
    assert found["sent_mb"].a == 4


def test_the_spread_is_that_of_both_notches() -> None:
    values = [float(value) for value in range(9)]  # quartiles 2 and 6
    twice = [2 * value + 1 for value in values]
    (found, *_) = compare({"step_ms": values}, {"step_ms": twice})
    assert found.spread == pytest.approx(1.58 * 4 / 3 + 1.58 * 8 / 3)
    assert (found.difference, found.is_explained) == (5.0, True)
    (found, *_) = compare({"step_ms": values}, {"step_ms": [7.0] * 9})
    assert found.spread == pytest.approx(1.58 * 4 / 3)
    assert (found.difference, found.is_explained) == (3.0, False)


def test_rounding_is_no_difference() -> None:
    sums = {"step_ms": [0.1 + 0.2] * 6}, {"step_ms": [0.3] * 6}
    assert verdict(compare(*sums)).startswith("There is no difference")


def test_two_halves_of_one_run_do_not_differ() -> None:
    rng = random.Random(7)
    slow = {step: rng.uniform(1, 2) for step in range(40)}
    a, b = (Planted(steps=40, slow_steps=each) for each in (slow, {s: slow[39 - s] for s in slow}))
    assert said(a, b) == "There is no difference beyond the spread of the steps."


def test_the_verdict_names_what_differs_most() -> None:
    assert said(BASE, replace(BASE, forward=60, data=1)) == (
        "The step of B is 39.0 ms (35 %) longer: forward +40.0 ms, between steps -1.00 ms."
    )
    assert said(BASE, replace(BASE, data=1)) == (
        "Step time: no difference beyond the spread of the steps; but between steps -1.00 ms."
    )
    assert said(BASE, replace(BASE, sent=250_000)).endswith(
        "spread of the steps; but sent -3.00 MB."
    )


def test_few_steps_have_no_spread() -> None:
    assert said(BASE, replace(BASE, steps=7)) == (
        "The steps cannot be compared: the spread of 5 steps is not enough, 6 are needed."
    )
    assert "cannot" not in said(BASE, replace(BASE, steps=8))


@pytest.mark.parametrize(
    ("run", "names", "reason"),
    [
        (
            bare(BASE.run(), buckets=(), spans=(), detailed=False),
            ["exposed_wait_ms", "exposed_transfer_ms", "exposed_ms", "sent_mb"],
            "B: no step was recorded in detail on all ranks",
        ),
        (
            replace(BASE, codec="ddp", encode=0, decode=0).run(),
            ["exposed_codec_ms"],
            "B: DDP itself exchanges the gradients, without a codec",
        ),
        (
            Run({0: BASE.run().ranks[0]}),
            ["exposed_wait_ms"],
            "B: exchanges without a record of rank 1 count as transfer, waiting included",
        ),
    ],
    ids=["only timed", "ddp", "one rank"],
)
def test_what_was_not_measured_has_a_reason_and_no_figure(
    run: Run, names: list[str], reason: str
) -> None:
    found = differences(BASE, run)
    assert found["step_ms"].difference is not None
    for name in names:
        assert (found[name].b, found[name].difference, found[name].spread) == (None, None, None)
        assert found[name].a is not None
        assert found[name].reason == reason
    assert (found["exposed_ms"].b is None) == ("exposed_ms" in names)


def test_what_goes_where_the_step_went_is_named_first() -> None:
    shorter = said(replace(BASE, forward=60, optimizer=5), replace(BASE, optimizer=21))
    assert shorter.endswith("ms (16 %) shorter: forward -40.0 ms, optimizer +16.0 ms.")
    less = said(replace(BASE, forward=30, data=20), replace(BASE, optimizer=21))
    assert less.endswith("shorter: between steps -18.0 ms, forward -10.0 ms, optimizer +16.0 ms.")


def test_all_steps_are_compared_apart_from_those_in_detail() -> None:
    slow = replace(BASE, slow_steps={step: 2 for step in range(0, 42, 2)}).run()
    few = [step for step in range(42) if step % 4]
    run = bare(slow, few, buckets=(), spans=(), detailed=False)
    summary, found = summarize(run), differences(BASE, run)
    assert found["step_ms"].b == pytest.approx(summary.detailed_step_ms) == pytest.approx(160)
    assert found["all_steps_ms"].b == pytest.approx(summary.step_ms["median"]) == pytest.approx(130)


def test_no_steps() -> None:
    assert said(BASE, Planted(steps=0)).startswith("The steps cannot be compared: B: no step")
