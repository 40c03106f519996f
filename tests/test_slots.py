"""Slots of the machine, which tests take as they have ranks."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
from processes import environment_of
from slots import RANKS_PER_CORE, slots, taking


@pytest.fixture
def four(tmp_path: Path) -> str:
    for number in range(4):
        (tmp_path / str(number)).touch()
    return str(tmp_path)


def started(folder: str, count: int) -> tuple[Event, Event, Thread]:
    """A thread that takes slots: whether it has them, what lets it go on, and itself."""
    has, release = Event(), Event()

    def take() -> None:
        with taking(folder, count):
            has.set()
            assert release.wait(60)

    thread = Thread(target=take)
    thread.start()
    return has, release, thread


def wait_for_its_turn(folder: str) -> None:
    """Until somebody waits for slots."""
    turn = os.open(folder, os.O_RDONLY)
    with suppress(BlockingIOError):
        while True:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(turn, fcntl.LOCK_UN)
    os.close(turn)


def test_as_many_as_there_are(four: str) -> None:
    with taking(four, 3):
        has_one, release_one, first = started(four, 1)
        assert has_one.wait(60)
        has_two, release_two, second = started(four, 2)
        wait_for_its_turn(four)
        has_last, release_last, third = started(four, 1)
        release_one.set()
        first.join(60)
        assert not has_two.wait(0.2), "one is free"
        assert not has_last.is_set(), "whoever came first is first"
    assert has_two.wait(60)
    assert has_last.wait(60)
    release_two.set()
    release_last.set()
    second.join(60)
    third.join(60)


def test_whoever_wants_more_than_there_are_has_all(four: str) -> None:
    with taking(four, 9):
        has, release, thread = started(four, 1)
        assert not has.wait(0.2)
    assert has.wait(60)
    release.set()
    thread.join(60)


def test_a_process_that_is_killed_gives_its_slots_back(four: str) -> None:
    code = (
        "import sys, slots\nwith slots.taking(sys.argv[1], 4): print(flush=True), sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, four],
        env=environment_of({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        has, release, thread = started(four, 1)
        assert not has.wait(0.2)
        process.send_signal(signal.SIGKILL)
    assert has.wait(60)
    release.set()
    thread.join(60)


def test_as_many_for_each_core() -> None:
    with slots() as folder:
        assert len(os.listdir(folder)) == RANKS_PER_CORE * len(os.sched_getaffinity(0))
