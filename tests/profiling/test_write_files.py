"""Every file of a report on its own: what one fails of keeps no other away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from planted import Planted

from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.report.files import write_files
from lightning_dist.profiling.run import read_run
from lightning_dist.shared_folder import replace_file

ALL = {"html": True, "trace": True, "csv": True}


def recorded(folder: Path) -> None:
    for rank, of_rank in Planted().run().ranks.items():
        file = RankFile(folder, rank=rank)
        file.write([of_rank.metadata, *of_rank.steps.values()])
        file.close()


def test_steps_that_are_another_text_meanwhile_keep_the_summary(tmp_path: Path) -> None:
    recorded(tmp_path)
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
    recorded(tmp_path)
    (tmp_path / "report.html").mkdir()
    run = read_run(tmp_path)
    written = write_files(tmp_path, run, summarize(run), **ALL)
    assert written.names == ["summary.json", "trace.json.gz", "steps.csv"]
    assert written.problems == [f"report.html not written to {tmp_path}: Is a directory"]
    left = {"report.html", "rank0.jsonl", "rank1.jsonl", *written.names}
    assert {each.name for each in tmp_path.iterdir()} == left
