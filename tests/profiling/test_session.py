"""What a step costs the process that is profiled, and when its lines are in the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from planted import MS, Planted
from processes import run

from lightning_dist.profiling.capture.events import (
    ClockRecord,
    EndRecord,
    StepRecord,
    from_line,
    to_line,
)
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.session import Session, SessionSettings
from lightning_dist.profiling.capture.steps import PendingStep

BUCKETS = 40


class Ended:
    def wait(self) -> None:
        pass


def record(recorder: Recorder) -> None:
    """A step as a reducer tells of it."""
    for bucket in range(BUCKETS):
        recorder.ready(bucket)
        recorder.works(bucket, "encode")()
        see = recorder.launches("all_gather", group="flat", sent=1)
        assert see is not None
        see(Ended())
        recorder.works(bucket, "decode")()
        recorder.note(bucket, recorder.device_clock.now(), (4, 0, 1, "int8"))


def calls_of(call: Callable[[], Any]) -> int:
    """How many functions of Python it takes; unlike its time the same on any machine."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def test_a_detailed_step_costs_about_one_call_a_row() -> None:
    recorder = Recorder()
    record(recorder)
    rows = 4 * BUCKETS

    def write_down() -> None:
        buckets, spans = recorder.take()
        step = PendingStep(0, 1, buckets=buckets, spans=spans).read(recorder.device_clock)
        assert len(step.buckets) + len(step.spans) == rows
        to_line(step)

    assert calls_of(write_down) < 1.5 * rows + 50


class Clock:
    """Shows what it is set to."""

    now = 0

    def __call__(self) -> int:
        return self.now


def step(session: Session, clock: Clock, seconds: float) -> None:
    """Forward, backward, optimizer, a third each."""
    timer = session.timer
    timer.forward()
    for event in (timer.backward, lambda: timer.backward_ended(synchronised=True)):
        clock.now += round(seconds / 3 * 1e9)
        event()
    clock.now += round(seconds / 3 * 1e9)
    timer.stepped()


def test_lines_are_in_the_file_after_a_second(tmp_path: Path) -> None:
    clock = Clock()
    about = Planted(steps=0).run().ranks[1].metadata
    session = Session(tmp_path, about, settings=SessionSettings(), clock=clock)
    path = tmp_path / "rank1.jsonl"
    assert from_line(path.read_text()) == about  # at once: it may be killed

    def steps() -> list[int]:
        records = map(from_line, path.read_text().splitlines())
        return [each.step for each in records if isinstance(each, StepRecord)]

    for _ in range(3):
        step(session, clock, 0.6)
    assert steps() == [0, 1]  # the third is over when the next begins
    step(session, clock, 0.6)
    session.end("finished")
    assert steps() == [0, 1, 2, 3]
    ended = from_line(path.read_text().splitlines()[-1])
    assert ended == EndRecord("finished", at=clock.now)
    assert from_line(path.read_text().splitlines()[0]) == about
    session.note(last := ClockRecord(5, 6, 7))
    session.close()
    assert from_line(path.read_text().splitlines()[-1]) == last


def test_records_that_are_kept_nowhere_are_reported(tmp_path: Path) -> None:
    clock, told = Clock(), []
    about = Planted(steps=0).run().ranks[0].metadata
    session = Session(None, about, settings=SessionSettings(), on_step=told.append, clock=clock)
    for _ in range(2):
        step(session, clock, 0.6)
    session.end("finished")
    assert [each.duration for each in told] == [600 * MS, 600 * MS]


def test_what_a_profile_needs_is_counted_in_its_step(tmp_path: Path) -> None:
    clock, told = Clock(), []
    about = Planted(steps=0).run().ranks[0].metadata
    session = Session(None, about, settings=SessionSettings(), on_step=told.append, clock=clock)
    for spent in (7 * MS, 0, 0):
        session.recorder.spent += spent
        step(session, clock, 0.6)
    session.end("finished")
    assert told[0].overhead >= 7 * MS
    assert [each.overhead for each in told[1:]] == [0, 0]


def test_a_disk_that_fails_is_reported_and_no_reason_to_stop(tmp_path: Path) -> None:
    clock, told = Clock(), []
    about = Planted(steps=0).run().ranks[1].metadata
    settings = SessionSettings()
    session = Session(tmp_path, about, settings=settings, on_problem=told.append, clock=clock)
    handle = os.open("/dev/full", os.O_WRONLY)
    os.dup2(handle, session._file._file.fileno())
    os.close(handle)
    for _ in range(4):
        step(session, clock, 0.6)
    session.end("finished")
    session.close()
    path = tmp_path / "rank1.jsonl"
    assert told == [f"{path}: No space left on device; further steps of this rank are not saved"]


FULL_IN_A_LINE = """
import resource, sys
from lightning_dist.profiling.capture.events import EndRecord
from lightning_dist.profiling.capture.files import RankFile
told = []
file = RankFile(sys.argv[1], rank=0, on_problem=told.append)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
file.write([EndRecord(50 * "x")])
file.close()
resource.setrlimit(resource.RLIMIT_FSIZE, before)
print(*told)
"""


def test_a_disk_that_is_full_in_the_middle_of_a_line_is_reported(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", FULL_IN_A_LINE, tmp_path], limit=60)
    path = tmp_path / "rank0.jsonl"
    told = f"{path}: File too large; further steps of this rank are not saved\n"
    assert done.require_success().output == told
    assert path.read_text() == '{"kind":"end","reason":"xxxxxx'


def test_a_disk_that_fails_at_the_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    about = Planted(steps=0).run().ranks[1].metadata
    session = Session(tmp_path, about, settings=SessionSettings(), on_problem=told.append)
    session.end("finished")

    def failing(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    session.close()
    assert told == [f"{tmp_path / 'rank1.jsonl'}: Input/output error; it may be incomplete"]


def test_what_disturbs_a_step_makes_nobody_look_less_often(tmp_path: Path) -> None:
    """The export of a trace took longer than any step."""
    clock, told = Clock(), []
    about = Planted(steps=0).run().ranks[0].metadata

    def begin_step(step: int) -> bool:
        clock.now += 5_000 * MS if step in (3, 4) else 0
        return step in (3, 4)

    session = Session(
        tmp_path,
        about,
        settings=SessionSettings(),
        begin_step=begin_step,
        on_step=told.append,
        clock=clock,
    )
    for _ in range(9):
        step(session, clock, 0.6)
    session.end("finished")
    session.close()
    assert [each.detailed for each in told] == [True] * 7
    records = map(from_line, (tmp_path / "rank0.jsonl").read_text().splitlines())
    kept = [each.step for each in records if isinstance(each, StepRecord)]
    assert kept == [each.step for each in told] == [0, 1, 2, 5, 6, 7, 8]
