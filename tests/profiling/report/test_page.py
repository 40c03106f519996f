"""The files of a report and its page, without a browser, and the summary on a terminal."""

import os
import random
import re
import subprocess
import sys
from math import inf, nan
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from planted import Planted, bare, replace, write
from report_pages import assert_snapshot, body_of, choices_of, figures_of, printed, text_of
from summaries import a_summary, a_timeline, sampled

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.profiling.analysis.metrics import METRICS, format_value
from lightning_dist.profiling.analysis.parts import (
    EXPOSED,
    PARTS,
    Summary,
    Timeline,
    TimelineSpan,
    Traffic,
)
from lightning_dist.profiling.analysis.summarize import pick_steps, summarize
from lightning_dist.profiling.capture.events import LinkRecord
from lightning_dist.profiling.report.figures import most_telling, write_report
from lightning_dist.profiling.report.files import write_files
from lightning_dist.profiling.report.tables import (
    buckets_table,
    facts,
    links_table,
    parts_table,
    ranks_table,
    run_table,
)
from lightning_dist.profiling.report.terminal import print_summary
from lightning_dist.profiling.run import Run, read_run
from lightning_dist.profiling.whatif.predict import Costs, with_whatif


def test_the_text_of_the_page() -> None:
    assert_snapshot("page.txt", text_of(a_summary(), a_timeline(), a_timeline(label="p95 step")))


def test_the_axis_of_steps_has_those_in_detail_one_beside_the_other() -> None:
    steps = [2, 6, 7, 8, 20]
    summary = sampled(a_summary(steps=24), steps)
    drawn = figures_of(summary)
    parts, (heat,) = drawn["steps"]["data"], drawn["waits"]["data"]
    assert len(parts) == len(PARTS)
    assert all(each["x"] == steps for each in (*parts, heat))
    assert {drawn[name]["layout"]["xaxis"]["type"] for name in ("steps", "waits")} == {"category"}
    assert {each["name"]: each["y"] for each in parts} == {
        METRICS[name].label: values for name, values in summary.per_step.breakdown_ms.items()
    }
    assert heat["z"] == list(summary.per_step.wait_ms.values())


def test_every_part_is_a_metric_with_a_meaning() -> None:
    assert tuple(METRICS)[: len(PARTS)] == PARTS
    assert all(METRICS[name].meaning for name in PARTS)
    assert len({METRICS[name].label for name in PARTS}) == len(PARTS)


def test_errors_of_a_bucket_are_medians_of_what_was_sampled() -> None:
    rng = random.Random(3)
    errors = [
        {"step": step, "bucket": bucket, "rank": 0, "relative_l2": rng.random(), "cosine": 0.5}
        for step in range(0, 1_000, 10)
        for bucket in range(3)
    ]
    none = {"relative_l2": nan, "cosine": inf, "residual_ratio": None}
    none_too = [{"step": 1, "bucket": bucket, "rank": 0, **none} for bucket in range(4)]
    table = buckets_table(replace(a_summary(steps=4), errors=[*errors, *none_too]))
    assert [each.key for each in table.columns[-2:]] == ["relative_l2", "cosine"]
    for bucket, row in enumerate(table.rows[:3]):
        values = [each["relative_l2"] for each in errors if each["bucket"] == bucket]
        assert row[-2:] == (format_value(median(values)), "0.500")
    assert table.rows[3][-2:] == ("n/a", "n/a")


def test_of_many_ranks_the_worst_are_shown_and_it_says_so() -> None:
    summary = a_summary(ranks=40, steps=4, late=33)
    timeline = a_timeline(ranks=40, buckets=2, late=33)
    ranks = most_telling(summary, range(40))
    assert len(ranks) == 16
    assert 33 in ranks
    assert max(summary.ranks, key=lambda each: each.wait_ms or 0).rank in ranks
    assert most_telling(summary, range(16)) == list(range(16))
    assert "Shown are 16 of 40 ranks" in text_of(summary, timeline)
    ticks = figures_of(summary, timeline)["timeline"]["layout"]["yaxis"]["ticktext"]
    assert [int(each.split("<br>")[0].removeprefix("rank ")) for each in ticks] == ranks


def test_a_bar_splits_where_the_last_rank_has_come() -> None:
    spans = {
        0: [
            TimelineSpan("exchange", 0, 1_000_000, 9_000_000, arrival=4_000_000, op="x", group="g"),
            TimelineSpan("exchange", 1, 1_000_000, 3_000_000, op="x", group="g"),
        ]
    }
    timeline = Timeline(1, "a step", {0: [("forward", 0, 9_000_000)]}, {}, spans)
    traces = {each["name"]: each for each in figures_of(a_summary(), timeline)["timeline"]["data"]}
    wait, transfer = traces["wait for the last rank"], traces["transfer"]
    assert (wait["base"], wait["x"]) == ([1.0], [3.0])
    assert (transfer["base"], transfer["x"]) == ([4.0], [5.0])
    unknown = traces["collective, launches not known"]
    assert (unknown["base"], unknown["x"]) == ([1.0], [2.0])


def test_the_step_of_the_time_line_is_chosen() -> None:
    run = Planted(steps=40, slow_steps={7: 3}).run()
    summary = summarize(run)
    picked = pick_steps(run, summary)
    assert [each.label for each in picked] == ["median step", "p95 step", "slowest step"][
        :: 2 if summary.step_ms["median"] == summary.step_ms["p95"] else 1
    ]
    assert picked[-1].step == 7
    drawn = choices_of(summary, *picked)["timeline"]
    assert len(drawn) == len(picked)
    ends = [each["layout"]["xaxis"]["range"][1] for each in drawn]
    assert ends == [pytest.approx(each, abs=0.01) for each in (summary.step_ms["median"], 220)]
    assert "slowest step (7)" in text_of(summary, *picked)


def test_a_time_line_with_less_says_what_is_missing() -> None:
    for phases, sentence in (
        ({0: [("forward", 0, 0)]}, "Only phases: buckets"),
        ({}, "Nothing was recorded inside this step"),
        ({0: [("forward", 0, 9)]}, "Only phases: buckets"),
    ):
        assert sentence in text_of(a_summary(), Timeline(1, "a step", phases, {}, {}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": 1, "late": 0}, "One rank: nothing to wait for."),
        ({"links": [{"rank": 0, "peer": None, "group": "flat", "sent": 10, "seconds": 1.0}]},
         "n/a between two nodes: only groups of ranks were measured."),
        ({"links": [], "unavailable": {"links": "no time"}}, "n/a: no time."),
        ({"errors": [], "unavailable": {"errors": "not asked for"}},
         "Compression errors: n/a, not asked for."),
        ({"overlap_fraction": None, "unavailable": {"overlap_fraction": "no exchange"}},
         "overlap\nn/a\nno exchange\n"),
        ({"straggler": None, "unavailable": {"straggler": "all alike"}},
         "straggler\nnone\nall alike\n"),
        ({"notes": []}, "Warnings\nNo warnings.\n"),
        ({"traffic": Traffic(8e6, 8e6, 0, 8e6),
          "unavailable": {"traffic.link_gbps": "not calibrated"}},
         "link bandwidth\nn/a\nnot calibrated\n"),
    ],
)  # fmt: skip
def test_a_view_without_data_says_why(changes: dict[str, Any], sentence: str) -> None:
    shape = {name: changes[name] for name in ("ranks", "late") if name in changes}
    rest = {name: value for name, value in changes.items() if name not in shape}
    assert sentence in text_of(replace(a_summary(steps=4, **shape), **rest))


def test_series_without_a_number_are_sentences() -> None:
    summary = a_summary(steps=4)
    waits = {0: [nan] * 4, 1: [0.0] * 4}
    per_step = replace(summary.per_step, breakdown_ms={"exposed_wait": [0.0] * 4}, wait_ms=waits)
    text = text_of(replace(summary, per_step=per_step, unavailable={"breakdown_ms": "no phases"}))
    assert "n/a: no phases." in text
    assert "No rank waited for another." in text


def test_the_matrix_has_all_bits_over_all_seconds() -> None:
    link = {"rank": 0, "peer": 1, "group": "flat"}
    links = [{**link, "sent": 1e8, "seconds": 1.0}, {**link, "sent": 3e8, "seconds": 1.0}]
    assert [row[1:] for row in links_table(replace(a_summary(), links=links)).rows] == [
        ("", "1.60"),
        ("", ""),
    ]


def test_hosts_are_listed_once_with_their_number_of_ranks() -> None:
    rows = run_table(a_summary(ranks=3, nodes=["vm", "vm", "b"])).rows
    assert ("nodes", "vm (2 ranks), b (1 rank)") in rows


def test_names_of_nodes_are_escaped_once() -> None:
    page = body_of(a_summary(steps=4, nodes=["a&b", "<c>"]))
    assert "to &lt;c&gt;</th>" in page
    assert "to a&amp;b</th>" in page


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.html", tmp_path / "other.html"
    write_report(one, a_summary(), [a_timeline()])
    write_report(other, a_summary(), [a_timeline()])
    assert one.read_bytes() == other.read_bytes()
    assert one.stat().st_size < 5_200_000
    text = one.read_text()
    assert text.count("plotly.js v") == 1
    before = text.partition("<script>")[0] + text.rpartition("<script>")[2]
    write_report(other, summarize(Run({})), [])
    assert other.stat().st_size < 100_000, "without figures there is no plotly"
    assert not re.findall(r"(?:src|href)=\"(?!#)|url\(|@import|https?://", before), "self-contained"


def test_commands_in_texts_are_code_and_nothing_else_is() -> None:
    summary = replace(
        a_summary(), notes=["run `lightning-dist doctor <x>` now"], headline="`a` and `<b>`"
    )
    text = body_of(summary)
    assert "run <code>lightning-dist doctor &lt;x&gt;</code> now" in text
    assert "<code>a</code> and <code>&lt;b&gt;</code>" in text
    assert "`" not in text


@pytest.mark.parametrize(
    "run",
    [
        Run({}),
        Planted(steps=0).run(),
        bare(Planted().run(), buckets=(), spans=(), detailed=False),
        bare(Planted().run(), buckets=(), spans=(), phases=(), detailed=False),
        Planted(world_size=1, buckets=0).run(),
        Planted(buckets=0, codec="ddp").run(),
        bare(Planted().run(), spans=()),
    ],
    ids=["no rank", "no step", "no detail", "no phases", "one rank", "blind", "no exchange"],
)
def test_of_what_summarize_makes_everything_missing_has_its_reason(run: Run) -> None:
    summary = with_whatif(summarize(run), run, lambda observed: Costs(reason="not asked"))
    text = text_of(summary, *pick_steps(run, summary))
    assert "no reason was recorded" not in text
    assert "nan" not in text.lower().replace("finance", "")
    assert all(reason in text for reason in summary.unavailable.values())
    tables = parts_table(summary), ranks_table(summary)
    cells = [cell for table in tables for row in table.rows for cell in row]
    if "breakdown_ms" in summary.unavailable:
        assert not {METRICS[name].label for name in EXPOSED} & set(cells)
        assert "communication is 0" not in text
        assert all(row[3:6] == ("n/a", "n/a", "n/a") for row in tables[1].rows)
        assert not any(each.value == "none" for each in facts(summary))


def test_only_the_page_imports_plotly() -> None:
    modules = ", ".join(
        f"lightning_dist.profiling.report.{x}" for x in ("files", "terminal", "trace")
    )
    code = f"import sys, {modules}; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_page_of_a_run_says_when_it_began_and_what_ran() -> None:
    run = Planted(world_size=1).run()
    about = replace(run.ranks[0].metadata, script="jobs/train.py")
    new = Run({0: replace(run.ranks[0], metadata=about)})
    broken = Run({0: replace(run.ranks[0], metadata=replace(about, unix=1e300))})
    origins = [text_of(summarize(each)).splitlines()[1] for each in (new, run, broken)]
    started = "started 2027-01-15 08:00:00 UTC"
    assert origins == [f"train.py, {started}", started, "train.py"]


def test_waiting_for_a_rank_without_lines_is_not_drawn() -> None:
    run = Run({0: Planted(late={1: 50}).run().ranks[0]})
    summary = summarize(run)
    assert not summary.per_step.wait_ms
    drawn = figures_of(summary, *pick_steps(run, summary))
    assert "waits" not in drawn
    assert "exposed wait" not in {trace["name"] for trace in drawn["steps"]["data"]}


ALL = {"html": True, "trace": True, "csv": True}


def test_steps_that_are_another_text_meanwhile_keep_the_summary(tmp_path: Path) -> None:
    write(tmp_path, Planted().run().ranks.values())
    run = read_run(tmp_path)
    summary = summarize(run)
    path = tmp_path / "rank1.jsonl"
    path.write_bytes(b"x" * path.stat().st_size)
    written = write_files(tmp_path, run, summary, **ALL)
    assert written.names == ["summary.json"]
    assert [each.partition(" not written")[0] for each in written.problems] == [
        "report.html",
        "trace.json.gz",
        "steps.csv",
    ]
    assert all("rank1.jsonl has changed while it was read" in each for each in written.problems)


def test_what_was_there_stays_until_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "summary.json", []
    path.write_bytes(b"old")

    def fsync(handle: int) -> None:
        seen.append((path.read_bytes(), os.fstat(handle).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(path, b"newer")
    assert seen == [(b"old", 5)]
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_the_page_keeps_the_rest(tmp_path: Path) -> None:
    write(tmp_path, Planted().run().ranks.values())
    (tmp_path / "report.html").mkdir()
    run = read_run(tmp_path)
    written = write_files(tmp_path, run, summarize(run), **ALL)
    assert written.names == ["summary.json", "trace.json.gz", "steps.csv"]
    assert written.problems == [f"report.html not written to {tmp_path}: Is a directory"]
    left = {"report.html", "rank0.jsonl", "rank1.jsonl", *written.names}
    assert {each.name for each in tmp_path.iterdir()} == left


def rows(summary: Summary) -> dict[str, str]:
    """What follows the label of each line."""
    lines = [line.strip().split("  ", 1) for line in printed(summary).splitlines()[1:]]
    return {each[0]: " ".join(each[1].split()) for each in lines if len(each) > 1}


def late() -> Summary:
    run = Planted(late={1: 50}).run()
    links = [LinkRecord("flat", sent=1_000_000_000, seconds=10)]
    return summarize(Run({**run.ranks, 0: replace(run.ranks[0], links=links)}, ["weather [bold]"]))


def test_the_text_of_a_planted_run() -> None:
    summary = late()
    wide = printed(summary)
    assert wide.startswith(f"{summary.headline}\n")
    assert {METRICS[name].label for name in PARTS} <= rows(summary).keys()
    narrow = printed(summary, width=60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "…" not in narrow
    text = "\n".join(line.rstrip() for line in (wide + narrow).splitlines())
    assert_snapshot("terminal.txt", f"{text}\n")


def test_what_is_not_known_is_no_zero() -> None:
    run = Planted(world_size=3).run()
    missing = summarize(Run({rank: run.ranks[rank] for rank in (0, 2)}))
    assert rows(missing)["exposed wait"].startswith("n/a exchanges without a record of rank 1")
    ddp = summarize(Planted(codec="ddp", encode=0, decode=0).run())
    assert rows(ddp)["exposed codec"].startswith("n/a")
    assert rows(missing)["link bandwidth"] == "n/a no link was measured"
    assert rows(missing)["0"] == "node-a 100 33.0 n/a n/a reference"
    alone = rows(summarize(Planted(world_size=1, buckets=0).run()))
    assert alone["bytes sent"] == "n/a one rank sends nothing"
    assert alone["overlap"] == "n/a one rank exchanges nothing"
    found = rows(summarize(bare(run, buckets=(), spans=(), detailed=False)))
    reason = "n/a no step was recorded in detail on all ranks"
    assert "no step was recorded in detail on all ranks" in found["parts"]
    assert found["exposed communication"] == reason
    assert not {"forward", "exposed transfer"} & set(found)
    assert found["0"] == "node-a 100 n/a n/a n/a reference"


def test_of_many_ranks_only_the_worst() -> None:
    text = printed(summarize(Planted(world_size=12, late={7: 20, 3: 45}).run()))
    after = text.split("4 of 12 ranks, those others waited for most, ms:\n")[1].splitlines()
    assert [line.split()[0] for line in after[1:]] == ["rank", "3", "0", "1", "2"]


def test_no_steps() -> None:
    summary = summarize(Planted(steps=0).run())
    assert printed(summary) == f"{summary.headline}\n"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarize(Planted(late={1: 50}).run())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[33m" in printed(summary, color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in printed(summary, color=True)


def test_without_a_terminal_a_line_stays_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = Planted().run()
    note = "a long story " * 30
    summary = summarize(Run(run.ranks, [note.strip()]))
    print_summary(summary)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert f"note: {note.strip()}" in out.splitlines()
