"""The array that means, series and files are slices of, and tables of a report."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from planted import MS, Planted, bare, replace, replaced
from summaries import a_summary

from lightning_dist.profiling.analysis.metrics import format_value
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS, Traffic
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.analysis.tables import step_table
from lightning_dist.profiling.report.tables import buckets_table, facts, parts_table, ranks_table
from lightning_dist.profiling.run import Run


def test_parts_add_up_to_every_step_of_every_rank() -> None:
    run = Planted(world_size=3, late={1: 30, 2: 70}, slow_steps={2: 3}).run()
    table = step_table(run, run.common_steps)
    assert table.values.shape[:2] == (6, 3)
    assert (table.of(*PARTS) == table.of("duration")).all()
    assert (table.of(*EXPOSED) == table.of("exposed")).all()
    assert (table.of("exposed_wait", "exposed_transfer", "hidden") == table.of("exchange")).all()


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
    steps[4] = replace(steps[4], detailed=False, buckets=(), spans=())
    table = step_table(replaced(run, 1, steps=steps), range(6))
    missing = np.isnan(table.values).all(axis=2)
    assert np.argwhere(missing).tolist() == [[3, 1], [4, 1]]
    assert np.isnan(table.values).any(axis=2).sum() == 2
    assert "rank 1" in table.unknown_wait


def test_a_host_has_one_link_to_the_others() -> None:
    run = Planted(world_size=4, hosts=["a", "a", "b", "b"]).run()
    sent, moving = step_table(run, [2]).link_uses()
    assert (sent.tolist(), moving.tolist()) == ([[8e6, 8e6]], [[60 * MS, 60 * MS]])
    alone, moving = step_table(Planted(hosts=["a"]).run(), [2]).link_uses()
    assert (alone.tolist(), moving.tolist()) == ([[4e6, 4e6]], [[60 * MS, 60 * MS]])


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


def test_ddp_has_no_times_of_a_codec_on_the_page() -> None:
    summary = summarize(Planted(codec="ddp", encode=0, decode=0).run())
    rows = {row[0]: row for row in parts_table(summary).rows}
    assert rows["exposed codec"][1:3] == ("n/a", "n/a")
    assert rows["exposed wait"][1:3] == ("0", "0 %")  # this was measured
    assert {(row[5], row[8]) for row in buckets_table(summary).rows} == {("n/a", "n/a")}
