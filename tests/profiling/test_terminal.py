from __future__ import annotations

import pytest
from planted import Planted, bare, replace
from rendered import assert_snapshot, printed

from lightning_dist.profiling.analysis.metrics import METRICS
from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import LinkRecord
from lightning_dist.profiling.report.terminal import print_summary
from lightning_dist.profiling.run import Run


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
    assert rows(missing)["0"] == "host-a 100 33.0 n/a n/a reference"
    alone = rows(summarize(Planted(world_size=1, buckets=0).run()))
    assert alone["bytes sent"] == "n/a one rank sends nothing"
    assert alone["overlap"] == "n/a one rank exchanges nothing"
    found = rows(summarize(bare(run, buckets=(), spans=(), detailed=False)))
    reason = "n/a no step was recorded in detail on all ranks"
    assert "no step was recorded in detail on all ranks" in found["parts"]
    assert found["exposed communication"] == reason
    assert not {"forward", "exposed transfer"} & set(found)
    assert found["0"] == "host-a 100 n/a n/a n/a reference"


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
