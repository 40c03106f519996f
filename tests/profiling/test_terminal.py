from __future__ import annotations

import io

import pytest
from planted import Planted, replace
from rich.console import Console

from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import LinkRecord
from lightning_dist.profiling.report.terminal import print_summary
from lightning_dist.profiling.run import Run


def printed(summary: Summary, *, width: int = 200, color: bool = False) -> str:
    file = io.StringIO()
    print_summary(summary, Console(file=file, width=width, force_terminal=color))
    return file.getvalue()


def rows(summary: Summary) -> dict[str, str]:
    """What follows the first word of each line."""
    lines = [line.split(maxsplit=1) for line in printed(summary).splitlines()[1:]]
    return {each[0]: " ".join(each[1].split()) for each in lines if len(each) > 1}


def test_a_planted_run() -> None:
    run = Planted(late={1: 50}).run()
    links = [LinkRecord("flat", sent=1_000_000_000, seconds=10)]
    run = Run({**run.ranks, 0: replace(run.ranks[0], links=links)}, ["weather [bold]"])
    summary = summarize(run)
    assert printed(summary).startswith(f"{summary.headline}\n")
    found = rows(summary)
    assert set(PARTS) <= found.keys()
    assert found["all"] == (
        "4 steps 150 ms mean of 2 ranks; median 150 ms, p95 150 ms, without the first 2"
    )
    assert found["step"] == "in detail 150 ms mean of 2 ranks; of 4 steps; its parts:"
    assert found["transfer"] == "45.5 ms 30 %, exposed"
    assert found["optimizer"] == "5 ms 3 %"
    assert found["hidden"] == "29 ms 34 % of exchanges"
    assert found["sent"] == "4 MB per step and rank, 4 times less than 16 MB uncompressed"
    assert found["rate"] == "0.533 Gbit/s of what was sent"
    assert found["use"] == "of link 67 %"
    assert found["0"] == "host-a 150 ms 83 ms 50 ms 0 ms"
    assert found["1"] == "host-b 150 ms 33 ms 0 ms 50 ms ± 0.02 ms"
    assert found["note:"] == "weather [bold]"


def test_what_is_not_known_is_no_zero() -> None:
    run = Planted(world_size=3).run()
    missing = summarize(Run({rank: run.ranks[rank] for rank in (0, 2)}))
    assert rows(missing)["wait"].startswith("n/a exchanges without a record of rank 1")
    assert rows(summarize(Planted(codec="ddp", encode=0, decode=0).run()))["codec"].startswith(
        "n/a"
    )
    assert rows(missing)["link"] == "n/a no link was measured"
    assert rows(missing)["0"] == "host-a 100 ms 33 ms n/a n/a"
    alone = rows(summarize(Planted(world_size=1, buckets=0).run()))
    assert alone["sent"] == "n/a one rank sends nothing"
    assert alone["hidden"] == "n/a one rank exchanges nothing"
    bare = {
        rank: replace(
            of,
            steps={
                s: replace(e, buckets=(), spans=(), detailed=False) for s, e in of.steps.items()
            },
        )
        for rank, of in run.ranks.items()
    }
    found = rows(summarize(Run(bare)))
    assert found["forward"] == "20 ms 20 %"
    assert found["step"] == "100 ms mean of 3 ranks; of 4 steps; its parts:"
    assert found["transfer"] == "n/a no step is recorded in detail on all ranks"
    assert found["0"] == "host-a 100 ms n/a n/a n/a"


def test_of_many_ranks_only_the_worst() -> None:
    text = printed(summarize(Planted(world_size=12, late={7: 20, 3: 45}).run()))
    after = text.split("4 of 12 ranks, those others waited for the most:\n")[1].splitlines()
    *table, words = after
    assert [line.split()[0] for line in table] == ["rank", "3", "0", "1", "2"]
    assert words == "waits, others wait: hidden or not; the part wait is what is exposed of it"


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


def test_a_narrow_terminal() -> None:
    lines = printed(summarize(Planted(late={1: 50}).run()), width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert "…" not in "".join(lines)
    assert "first 2" in " ".join(" ".join(lines).split())
