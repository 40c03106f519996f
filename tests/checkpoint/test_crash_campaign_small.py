"""A fixed part of the crash campaign: some trials of every kind, at the same moments every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run

from tests.campaigns.checkpoint_crash.oracle import PROBLEMS

KINDS = (
    "kill the trainer",
    "kill the writer",
    "kill trainer and writer",
    "slow disk (thread)",
    "stopped writer process",
    "dropped snapshot",
    "damaged on disk",
    "kill before every system call",
    "kill after every system call",
    "power cut, names lost every system call",
    "power cut, names kept every system call",
    "EIO at every system call",
    "ENOSPC for good at every system call",
    "short writes at every system call",
)


@pytest.mark.slow
def test_nothing_is_lost_in_a_small_campaign(tmp_path: Path, quick_python: list[str]) -> None:
    """In a process of its own: the campaign forks, which a process with threads must not."""
    result = tmp_path / "campaign.json"
    options = ["--trials", "10", "--seed", "3", "--every", "150", "--folder", tmp_path]
    for kind in KINDS:
        options += ["--kind", kind]
    run(
        [*quick_python, "-m", "tests.campaigns.checkpoint_crash", *options, "--json", result],
        limit=100,
    ).require_success()
    rows = json.loads(result.read_text())["rows"]
    assert {row["kind"] for row in rows} == set(KINDS)
    for row in rows:
        assert {name: row[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0), row["failures"]
