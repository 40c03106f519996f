"""What the report is made of, without a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_pages import body_of, figures_of
from summaries import a_summary, a_timeline, sampled

from lightning_dist.profiling.analysis.parts import PARTS, Placed, Timeline, Traffic
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.bins import bins, columns, mean, most_frequent
from lightning_dist.profiling.report.facts import facts
from lightning_dist.profiling.report.figures_timeline import shown
from lightning_dist.profiling.report.html import write_report
from lightning_dist.profiling.report.text import megabytes, ms, number, percent, rate
from lightning_dist.profiling.report.words import PART_WORDS
from lightning_dist.profiling.run import Run


@pytest.mark.parametrize("count", [0, 1, 7, 300, 301, 1000])
def test_bars_are_even_and_leave_nothing_out(count: int) -> None:
    runs = bins(count, most=300)
    assert [i for run in runs for i in range(count)[run]] == list(range(count))
    assert len(runs) <= 300
    lengths = {run.stop - run.start for run in runs}
    assert not lengths or max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("steps", "width"),
    [
        ([7], 1),
        (range(2, 252), 1),
        (range(2, 253), 2),
        ([2, 3, 9, 40], 1),
        (range(5, 5000, 16), 20),
        ([0, 100_000], 401),
    ],
)
def test_columns_are_equal_parts_of_the_axis(steps: Sequence[int], width: int) -> None:
    found = columns(steps, most=250)
    assert found.width == width
    assert len(found.runs) <= 250
    assert [step for run in found.runs for step in steps[run]] == list(steps)
    low, high = found.range
    edges = [(x - width / 2, x + width / 2) for x in found.middles]
    assert (edges[0][0], edges[-1][1]) == (low, high)
    assert all(left[1] == right[0] for left, right in pairwise(edges))
    for run, (begin, end) in zip(found.runs, edges, strict=True):
        assert all(begin < step < end for step in steps[run])


def test_steps_that_were_not_looked_at_are_gaps() -> None:
    steps = [2, 6, 7, 8, 20]
    drawn = figures_of(sampled(a_summary(steps=24), steps))
    heat = drawn["waits"]["data"][0]
    assert heat["x"] == list(range(2, 21))
    for row in heat["z"]:
        assert [x for x, z in zip(heat["x"], row, strict=True) if z is not None] == steps
    assert not heat["hoverongaps"]
    assert drawn["waits"]["layout"]["xaxis"]["range"] == [1.5, 20.5]
    for bars in drawn["steps"]["data"]:
        assert bars["x"] == steps
        assert bars["width"] == 0.85
    marks = drawn["waits"]["data"][1]
    assert set(marks["x"]) <= set(steps)
    body = body_of(sampled(a_summary(steps=24), steps))
    assert (
        body.count("Steps that were not looked at in detail are blank.") == 2 * 2
    )  # and its label
    assert "are blank" not in body_of(a_summary(steps=24))


def test_bars_of_many_steps_are_no_wider_than_what_they_are_of() -> None:
    steps = [*range(2, 302), *range(900, 1002)]
    drawn = figures_of(sampled(a_summary(steps=1000), steps))
    for bars in drawn["steps"]["data"]:
        edges = [(x - bars["width"] / 2, x + bars["width"] / 2) for x in bars["x"]]
        assert not [edge for edge in edges if 305 < edge[1] < 899]
        assert all(end - begin == 4 for begin, end in edges)


def test_means_and_counts_leave_out_what_is_no_number() -> None:
    assert mean([1.0, None, 3.0, float("nan")]) == 2.0
    assert mean([None]) is None
    assert most_frequent([None, 2, 1, 1, None, None]) == 1
    assert most_frequent([None]) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(1234.5), "1,234"),
        (number(12.34), "12.3"),
        (number(1.0), "1.00"),
        (number(0.17), "0.170"),
        (number(0.00004), "4e-05"),
        (number(0), "0"),
        (number(None), "n/a"),
        (number(float("nan")), "n/a"),
        (ms(0.5), "0.500 ms"),
        (percent(0.314), "31 %"),
        (percent(0.0421), "4.2 %"),
        (percent(0), "0 %"),
        (megabytes(16.3e6), "16.3 MB"),
        (megabytes(999), "999 bytes"),
        (rate(0.187), "187 Mbit/s"),
        (rate(9.4), "9.40 Gbit/s"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(text: str, expected: str) -> None:
    assert text == expected


def test_every_part_has_words() -> None:
    assert tuple(PART_WORDS) == PARTS


def test_many_steps_are_few_bars_with_the_same_mean() -> None:
    summary = a_summary(steps=1000)
    traces = figures_of(summary)["steps"]["data"]
    transfer = next(each for each in traces if each["name"] == "exposed: transfer")
    assert len(transfer["y"]) == 250
    assert transfer["width"] * 250 == 1000
    assert sum(transfer["y"]) / 250 == pytest.approx(
        sum(summary.series.parts_ms["transfer"]) / 1000
    )
    assert "up to 4 steps" in body_of(summary)


def test_of_many_ranks_the_worst_are_shown_and_it_says_so() -> None:
    summary = a_summary(ranks=40, steps=4, late=33)
    timeline = a_timeline(ranks=40, buckets=2, late=33)
    ranks = shown(summary, range(40))
    assert len(ranks) == 16
    assert 33 in ranks
    assert max(summary.ranks, key=lambda each: each.wait_ms).rank in ranks
    assert shown(summary, range(16)) == list(range(16))
    assert "These are 16 of 40 ranks" in body_of(summary, timeline)
    ticks = figures_of(summary, timeline)["timeline-0"]["layout"]["yaxis"]["ticktext"]
    assert [int(each.split("<br>")[0].removeprefix("rank ")) for each in ticks] == ranks


def test_a_bar_splits_where_the_last_rank_has_come() -> None:
    spans = {
        0: [
            Placed("exchange", 0, 1_000_000, 9_000_000, arrival=4_000_000, op="x", group="g"),
            Placed("exchange", 1, 1_000_000, 3_000_000, op="x", group="g"),
        ]
    }
    timeline = Timeline(1, "a step", {0: [("forward", 0, 9_000_000)]}, {}, spans)
    traces = {
        each["name"]: each for each in figures_of(a_summary(), timeline)["timeline-0"]["data"]
    }
    wait, transfer = traces["waiting for the last rank"], traces["transfer"]
    assert (wait["base"], wait["x"]) == ([1.0], [3.0])
    assert (transfer["base"], transfer["x"]) == ([4.0], [5.0])
    unknown = traces["exchange, arrivals unknown"]
    assert (unknown["base"], unknown["x"]) == ([1.0], [2.0])


@pytest.mark.parametrize(
    ("timeline", "sentence"),
    [
        (Timeline(1, "a step", {0: [("forward", 0, 0)]}, {}, {}), "Only phases: buckets"),
        (Timeline(1, "a step", {}, {}, {}), "Nothing was recorded inside this step"),
        (Timeline(1, "a step", {0: [("forward", 0, 9)]}, {}, {}), "Only phases: buckets"),
    ],
)
def test_a_time_line_with_less_says_what_is_missing(timeline: Timeline, sentence: str) -> None:
    assert sentence in body_of(a_summary(), timeline)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": 1, "late": 0}, "There is one rank, and nobody it could wait for."),
        ({"links": [{"rank": 0, "peer": None, "group": "flat", "sent": 10, "seconds": 1.0}]},
         "n/a between two hosts: only whole groups of ranks were."),
        ({"links": [], "reasons": {"links": "no time"}}, "n/a: no time."),
        ({"errors": [], "reasons": {"errors": "not asked for"}}, "n/a: not asked for."),
        ({"overlap": None, "reasons": {"overlap": "no exchange"}}, "<dd>no exchange</dd>"),
        ({"straggler": None, "reasons": {"straggler": "all alike"}}, "<dd>all alike</dd>"),
    ],
)  # fmt: skip
def test_a_view_without_data_says_why(changes: dict[str, Any], sentence: str) -> None:
    shape = {name: changes[name] for name in ("ranks", "late") if name in changes}
    rest = {name: value for name, value in changes.items() if name not in shape}
    assert sentence in body_of(replace(a_summary(steps=4, **shape), **rest))


def test_nobody_waiting_is_a_sentence() -> None:
    summary = a_summary(steps=4)
    series = replace(summary.series, wait_ms={0: [0.0] * 4, 1: [0.0] * 4})
    assert "No rank has waited for another." in body_of(replace(summary, series=series))


def test_series_without_a_number_are_sentences() -> None:
    summary = a_summary(steps=4)
    nothing = {0: [float("nan")] * 4, 1: [0.0] * 4}
    series = replace(summary.series, parts_ms={"wait": [0.0] * 4}, wait_ms=nothing)
    text = body_of(replace(summary, series=series, reasons={"parts_ms": "no phases"}))
    assert "n/a: no phases." in text
    assert "No rank has waited for another." in text


@pytest.mark.parametrize(
    ("raw", "words"), [(0.0, "more than"), (8e6, "as many as"), (3.2e7, "4.0 times fewer than")]
)
def test_bytes_are_compared_with_ddp(raw: float, words: str) -> None:
    found = facts(replace(a_summary(), traffic=Traffic(raw, 8e6, 0, 8e6)))
    (sent,) = [each for each in found if each.label.startswith("Sent")]
    assert sent.detail.startswith(f"{words} uncompressed DDP")


def test_a_bandwidth_without_a_peak_says_why() -> None:
    traffic = Traffic(8e6, 8e6, 0, 8e6, wire_gbps=1.5)
    reasons = {"traffic.peak_gbps": "not calibrated"}
    found = {
        each.label: each for each in facts(replace(a_summary(), traffic=traffic, reasons=reasons))
    }
    assert found["Bandwidth used"].detail == "peak n/a: not calibrated"


def test_the_matrix_has_all_bits_over_all_seconds() -> None:
    link = {"rank": 0, "peer": 1, "group": "flat"}
    links = [{**link, "sent": 1e8, "seconds": 1.0}, {**link, "sent": 3e8, "seconds": 1.0}]
    (heat,) = figures_of(replace(a_summary(), links=links))["links"]["data"]
    assert heat["z"] == [[None, 1.6], [None, None]]


def test_numbers_that_are_none_do_not_break_it() -> None:
    nan, error = float("nan"), {"step": 1, "bucket": 0, "rank": 0}
    summary = replace(
        a_summary(steps=4),
        errors=[
            {**error, "relative_l2": nan, "cosine": float("inf"), "residual_ratio": None},
            {**error, "relative_l2": 0.5, "cosine": 0.9, "residual_ratio": None},
        ],
    )
    curves = figures_of(summary)["errors"]["data"]
    assert [each["y"] for each in curves if each["mode"] != "lines"] == [[0.5], [0.9]]
    assert "no residual was kept" in body_of(summary)


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.html", tmp_path / "other.html"
    write_report(one, a_summary(), [a_timeline()])
    write_report(other, a_summary(), [a_timeline()])
    assert one.read_bytes() == other.read_bytes()
    assert one.stat().st_size < 5_200_000
    assert one.read_text().count("plotly.js v") == 1


def test_half_a_character_is_no_reason_to_have_no_report(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, a_summary(hosts=["host-\ud83d", "b"]), [a_timeline()])
    assert "host-?" in path.read_bytes().decode()


def test_commands_in_texts_are_code_and_nothing_else_is() -> None:
    summary = replace(
        a_summary(), notes=["run `lightning-dist doctor <x>` now"], headline="`a` and `<b>`"
    )
    text = body_of(summary)
    assert "run <code>lightning-dist doctor &lt;x&gt;</code> now" in text
    assert "<code>a</code> and <code>&lt;b&gt;</code>" in text
    assert "`" not in text


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        write_report(tmp_path / "report.html", summarize(Run({})), [])
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
