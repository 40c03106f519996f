"""What happened to a run, as files that survive every process."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.elastic.data.plan import Layout
from lightning_dist.elastic.history import (
    CHANGE,
    Journal,
    Progress,
    RestartCosts,
    RunHistory,
    summarize,
)
from lightning_dist.elastic.recovery.protocol import Generation, Outage, OutageReport, norm_of_lost
from lightning_dist.ranks.agreement import Ranks


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(tmp_path: Path, clock: Clock) -> Callable[..., Journal]:
    return lambda rank=0: Journal(str(tmp_path), rank=rank, clock=clock)


Make = Callable[..., Journal]


def file_of(folder: Path, rank: int) -> Path:
    return folder / "elastic" / f"rank-{rank}.jsonl"


def test_lines_of_all_ranks_by_time(journal: Make, clock: Clock, tmp_path: Path) -> None:
    assert journal().read() == []
    assert journal().last_progress() is None
    writer = journal(1)  # which keeps nothing back
    writer.write("start", world_size=2)
    clock.now = 50.0
    journal(0).write("end", reason="ü\nline")
    expected = [
        {"event": "end", "time": 50.0, "rank": 0, "reason": "ü\nline"},
        {"event": "start", "time": 100.0, "rank": 1, "world_size": 2},
    ]
    assert journal(0).read() == journal(7).read() == expected
    assert json.loads(file_of(tmp_path, 1).read_text()) == expected[1]


def test_changes_within_the_process_are_added_up(journal: Make) -> None:
    first = OutageReport(1, 7, 2, lost=["0.1.0"], is_redone=True, pause_s=0.25, norm_lost=0.5)
    second = OutageReport(2, 10, 3, joined=["0.1.1"], pause_s=0.5)
    for each in (first, second):
        journal().write(CHANGE, run_id="a", **asdict(each))
    journal().write(CHANGE, run_id="b", **asdict(first))
    found = summarize(journal().read(), run_id="a")
    assert found == RestartCosts(
        generations=2, steps_redone=1, recovery_s=0.75, residual_norm_lost=0.5
    )


def test_a_change_is_one_line() -> None:
    reason = "worker 0.1.0 was lost: SIGKILL"
    change = OutageReport(1, 7, 2, reason=reason, is_redone=True, pause_s=0.254, norm_lost=0.5)
    assert change.line == (
        "elastic: 2 ranks after step 7, within the process (generation 1): worker 0.1.0 was lost: "
        "SIGKILL; step 8 is repeated; residuals of norm 0.5 lost; paused 0.25 s"
    )


def test_a_step_that_any_rank_has_begun_is_repeated() -> None:
    """The leader may still be between two steps, and a newcomer has begun none."""
    outage = Outage(members=("0.0.0", "0.1.0", "0.2.0"))
    generation = Generation(1, members=("0.0.0", "0.1.1", "0.2.0"))
    outage.enter(generation, [(1.0, "", False), (None, "", False), (1.0, "", True)])
    assert outage.report(generation, step=6).is_redone


def test_the_norm_of_lost_residuals_is_that_of_as_many_others() -> None:
    assert norm_of_lost([3.0, None, 3.0], lost=4) == 6.0
    assert norm_of_lost([None], lost=1) == norm_of_lost([1.0], lost=0) == 0.0


@pytest.mark.parametrize("kept", range(0, 40, 3))
def test_a_line_that_a_crash_has_cut_short_costs_no_other(
    journal: Make, tmp_path: Path, kept: int
) -> None:
    journal().write("start", number=1)
    file = file_of(tmp_path, 0)
    first = file.read_text()
    file.write_text(first + first[:kept])
    assert [line["number"] for line in journal().read()] == [1]
    after = journal()
    after.write("start", number=2)
    after.write("end", number=3)
    assert [line["number"] for line in after.read()] == [1, 2, 3]


def test_lines_that_are_none_of_ours(journal: Make, tmp_path: Path) -> None:
    journal().write("start")
    with file_of(tmp_path, 0).open("ab") as file:
        file.write(b'\xff\xfe\x00\n[1]\n"text"\n\n{"event": "end"}\nnull\n')
    assert [line["event"] for line in journal().read()] == ["start"]


def test_a_file_that_cannot_be_read_costs_no_other(journal: Make, tmp_path: Path) -> None:
    journal(1).write("start")
    file_of(tmp_path, 0).mkdir()
    assert [line["rank"] for line in journal(1).read()] == [1]


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("first", ["write", "progress"])
def test_a_folder_that_takes_nothing_is_no_reason_to_stop(
    tmp_path: Path, first: str, is_given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is none at all. What the disk refuses is said once."""
    (tmp_path / "elastic").write_text("a file where the folder should be")
    journal = Journal(str(tmp_path) if is_given else None, rank=0)
    for _ in range(2):
        if first == "write":
            journal.write("start")
        journal.progress(5)
        journal.write("end")
    assert journal.read() == []
    assert journal.last_progress() is None
    journal.close()
    assert len(caplog.messages) == is_given
    assert all("restarts are not recorded from now on" in text for text in caplog.messages)


def test_files_have_the_permissions_that_the_user_wants(journal: Make, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        journal().write("start")
        journal().progress(1)
    finally:
        os.umask(before)
    files = [*(tmp_path / "elastic").iterdir()]
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o664}


def begun(folder: Path, first: Layout) -> RunHistory:
    history = RunHistory()
    history.open(str(folder), ranks=Ranks(None), seed=None)
    history.start(None, first=history.first or first, world_size=1)
    history.step(12)
    history.close()
    return history


@pytest.mark.parametrize("had_saved", [True, False])
@pytest.mark.parametrize("is_left", [True, False])
def test_a_run_whose_checkpoints_were_removed_is_over(
    tmp_path: Path, had_saved: bool, is_left: bool
) -> None:
    """One that had none yet goes on with its layout, seed and name."""
    before = begun(tmp_path, Layout(4, 2, 1, 8))
    if had_saved:
        before.saved()
    if is_left:
        (tmp_path / "epoch=0-step=1.ckpt").touch()
    after = begun(tmp_path, Layout(1, 3, 1, 3))
    is_same = is_left or not had_saved
    assert (after.run_id == before.run_id) == is_same
    assert (after.seed == before.seed) == is_same
    assert after.first == (Layout(4, 2, 1, 8) if is_same else None)
    assert (after.summary.restarts == 1) == is_same


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=5), st.floats(0, 10**10))
def test_the_last_progress_counts(
    tmp_path_factory: pytest.TempPathFactory, samples: list[int], now: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(str(folder), rank=0, clock=Clock(now))
    for each in samples:
        journal.progress(each)
    later = Journal(str(folder), rank=0)
    assert later.last_progress() == Progress(samples[-1], now)
    journal.close()
    assert len((folder / "elastic" / "progress").read_bytes()) <= 80


@pytest.mark.parametrize("torn", ["", '{"samples": 3, "ti', "[3]", '{"samples": 3}', "\0" * 64])
def test_progress_that_is_torn_is_none(journal: Make, tmp_path: Path, torn: str) -> None:
    journal().progress(3)
    (tmp_path / "elastic" / "progress").write_text(torn)
    assert journal().last_progress() is None


def test_a_journal_that_was_closed_goes_on(journal: Make) -> None:
    one = journal()
    one.progress(3)
    one.close()
    one.close()
    one.progress(4)
    assert one.last_progress() == Progress(4, 100.0)
    one.close()


def line(event: str, time: float, rank: int = 0, **facts: Any) -> dict[str, Any]:
    return {"event": event, "time": time, "rank": rank, **facts}


def start(time: float, redone: int | None = 0, *, ranks: int = 2, run: str = "a") -> dict[str, Any]:
    return line("start", time, run_id=run, world_size=ranks, redone=redone)


def test_a_run_that_nothing_happened_to() -> None:
    assert summarize([], run_id="a") == RestartCosts()
    quiet = [start(0, None), line("end", 9, reason="finished")]
    assert summarize(quiet, run_id="a") == RestartCosts()


def test_what_restarts_have_cost() -> None:
    lines = [
        start(0, None),
        line("end", 5, 1, reason="RuntimeError: Connection closed by peer", kind="echo"),
        line("end", 6, 0, reason="ValueError: bad sample", kind="own"),
        start(10, 16, ranks=3),
        line("caught_up", 12, run_id="a", seconds=7.5),
        line("end", 20, 0, reason="peer preempted", kind="echo"),
        line("end", 21, 2, reason="SIGTERM", kind=""),
        line("end", 22, 1, reason="peer preempted", kind="echo"),
        start(30, 0),
        line("caught_up", 33, run_id="a", seconds=2.0),
        line("end", 40, 0, reason="finished"),
    ]
    assert summarize(lines, run_id="a") == RestartCosts(
        restarts=2,
        causes=["rank 0: ValueError: bad sample", "rank 2: SIGTERM"],
        lost_time_s=9.5,
        samples_recomputed=16,
    )


@pytest.mark.parametrize(
    ("echoes", "cause"),
    [
        ([0, 2], "rank 1 terminated without a record (SIGKILL or out of memory?)"),
        ([1], "ranks 0, 2 terminated without a record (SIGKILL or out of memory?)"),
        ([0, 1, 2], "rank unknown terminated without a record (SIGKILL or out of memory?)"),
        ([], "ranks 0, 1, 2 terminated without a record (SIGKILL or out of memory?)"),
    ],
)
def test_who_was_killed_has_not_written(echoes: list[int], cause: str) -> None:
    ends = [line("end", 5, rank, reason="Connection reset", kind="echo") for rank in echoes]
    assert summarize([start(0, ranks=3), *ends, start(9)], run_id="a").causes == [cause]


def test_other_runs_in_the_folder_do_not_count() -> None:
    lines = [
        start(0, run="old"),
        start(2, 50, run="old"),
        line("caught_up", 3, run_id="old", seconds=99.0),
        line("end", 4, reason="OldError: of another run", kind="own"),
        start(5, None),
        start(7, 4),
        line("caught_up", 8, run_id="a", seconds=1.0),
    ]
    assert summarize(lines, run_id="a") == RestartCosts(
        1, ["ranks 0, 1 terminated without a record (SIGKILL or out of memory?)"], 1.0, 4
    )


def test_a_start_that_knows_of_no_progress_has_redone_nothing() -> None:
    starts = [start(0, None), start(1, None), start(2, 3)]
    assert summarize(starts, run_id="a").samples_recomputed == 3
