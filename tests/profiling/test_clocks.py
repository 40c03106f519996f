"""Clocks that are wrong by known amounts: what ranks read of them is true, within what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from planted_clocks import PlantedClock
from processes import run
from worlds import Rank, run_threads

from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from lightning_dist.profiling import clocks
from lightning_dist.profiling.capture.events import ClockRecord
from lightning_dist.profiling.clocks import read_offset

SCRIPT = Path(__file__).with_name("read_clocks.py")
HOUR = 3_600_000_000_000
FOUR = ["a", "b", "c", "d"]

ROWS: dict[str, dict[str, Any]] = {
    "shifted": {"shifts": [0, HOUR, -HOUR, 12_345], "machines": FOUR},
    "rank 0 is shifted": {"shifts": [-HOUR, 0, 0, 5_000_000], "machines": FOUR},
    "drifting": {"shifts": [7, HOUR, 0, -99], "drifts": [0, 200, -200, 50], "machines": FOUR},
    "rank 0 drifts": {"shifts": [0, 0, 0, 0], "drifts": [150, 0, 0, -150], "machines": FOUR},
    "two machines": {"shifts": [0, HOUR, 0, HOUR], "machines": ["a", "b", "a", "b"]},
    "one question": {"shifts": [0, 1, 2, 3], "machines": FOUR, "arguments": {"rounds": 1}},
    "busy": {"shifts": [0, HOUR, -HOUR, 0], "machines": FOUR, "busy": 4_000_000},
    "what the kernel says": {"shifts": [0, 0, 0, 0]},
}
LINKED: dict[str, dict[str, Any]] = {
    "idle": {"shifts": [5, -HOUR], "drifts": [0, 100], "machines": FOUR},
    "busy": {"shifts": [0, HOUR], "machines": FOUR, "busy": 1_000_000},
    "what the kernel says": {"shifts": [0, 0]},
}
"""Of two hosts with 200 Mbit/s each."""

Reading = dict[str, int]
Readings = dict[str, list[Reading]]


def of_rows(rows: dict[str, Any], output: str) -> Readings:
    """What the ranks have printed, in their order, by row."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]
    ranks = sorted(lines, key=lambda line: line["rank"])
    return {name: [rank["found"][i] for rank in ranks] for i, name in enumerate(rows)}


@pytest.fixture(scope="module")
def readings(quick_python: list[str]) -> Readings:
    command = [*quick_python, SCRIPT, *map(json.dumps, ROWS.values())]
    return of_rows(ROWS, run(command, limit=90).require_success().output)


@pytest.fixture(scope="module")
def linked(quick_python: list[str]) -> Readings:
    argv = [*quick_python, str(SCRIPT), *map(json.dumps, LINKED.values())]
    try:
        with Testbed(hosts=2, link_mbit=200) as testbed:
            return of_rows(LINKED, "\n".join(testbed.launch(argv, timeout_s=90)))
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))


def require_true(row: dict[str, Any], found: list[Reading]) -> None:
    """Every offset is right, give or take its own uncertainty."""
    drifts = row.get("drifts", [0] * 4)
    clocks = [PlantedClock(*each) for each in zip(row["shifts"], drifts, strict=False)]
    assert found[0]["offset"] == found[0]["uncertainty"] == 0
    for clock, reading in zip(clocks, found, strict=True):
        truth = clocks[0].at(clock.true(reading["at"])) - reading["at"]
        assert abs(reading["offset"] - truth) <= reading["uncertainty"] + 1  # nanosecond of `true`


@pytest.mark.parametrize("name", ROWS)
def test_offsets_are_as_planted(readings: Readings, name: str) -> None:
    require_true(ROWS[name], readings[name])


@pytest.mark.root
@pytest.mark.parametrize("name", LINKED)
def test_offsets_between_hosts_are_as_planted(linked: Readings, name: str) -> None:
    require_true(LINKED[name], linked[name])


def test_who_has_asked_is_not_certain(readings: Readings) -> None:
    assert all(each["uncertainty"] > 0 for each in readings["shifted"][1:])


def test_one_rank_of_a_machine_asks_for_all(readings: Readings) -> None:
    first, second, third, fourth = readings["two machines"]
    facts = ("at", "offset", "uncertainty")
    assert [first[name] for name in facts] == [third[name] for name in facts]
    assert [second[name] for name in facts] == [fourth[name] for name in facts]
    assert (third["calls"], fourth["calls"]) == (1, 1)
    assert second["calls"] > 32


def test_as_many_questions_as_rounds(readings: Readings) -> None:
    calls = [each["calls"] for each in readings["one question"]]
    assert calls == [1 + 3, 1 + 1 + 2, 1 + 1 + 2, 1 + 1 + 2]


def test_ranks_of_one_kernel_need_no_answer(readings: Readings, linked: Readings) -> None:
    for found in (readings["what the kernel says"], linked["what the kernel says"]):
        assert [(each["offset"], each["uncertainty"]) for each in found] == [(0, 0)] * len(found)
        assert len({each["at"] for each in found}) == 1


def read_scripted(shown: Sequence[Sequence[int]], **arguments: int) -> list[ClockRecord]:
    """What ranks read whose clocks show these numbers, one after the other."""

    def one(rank: Rank) -> ClockRecord:
        clock, name = iter(shown[rank.rank]).__next__, str(rank.rank)
        return read_offset(rank.group("clocks"), clock=clock, machine=name, **arguments)

    return run_threads(one, len(shown))


def test_the_answer_that_came_back_fastest_counts() -> None:
    trips = [0, 100, 200, 211, 600, 650]
    found = read_scripted([[0, 1_000, 2_000, 3_000], [0, 0, *trips]], rounds=3)
    assert found[1] == ClockRecord(at=205, offset=2_000 - 205, uncertainty=6)


def test_no_more_questions_where_an_answer_takes_long() -> None:
    trips = [0, 300_000_000, 400_000_000, 400_000_010]
    assert read_scripted([[0, 7, 8], [0, 0, *trips]])[1].at == 400_000_005


def test_a_kernel_that_does_not_tell_shares_its_clock_with_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert clocks.this_machine() == clocks.this_machine()
    monkeypatch.setattr(clocks, "_BOOT", tmp_path / "boot_id")
    one = clocks.this_machine()
    monkeypatch.setattr(clocks.os, "getpid", lambda: -1)
    assert clocks.this_machine() != one
