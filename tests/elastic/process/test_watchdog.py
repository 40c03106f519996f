"""A process that hangs ends itself, and one that does not is left alone."""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from orphaned import EXIT_ASKED
from processes import Finished, run

from lightning_dist.elastic.process import watchdog
from lightning_dist.elastic.process.watchdog import EXIT_STUCK, Watchdog

LIMIT = 20.0
HANGING = Path(__file__).with_name("hanging.py")


class Clock:
    """Stands still until it is moved; knows when it was looked at."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looks = 0
        self._looked = threading.Condition()

    def __call__(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self.now

    def wait_until_looked_at(self, times: int = 4) -> None:
        with self._looked:
            seen = self._looks
            assert self._looked.wait_for(lambda: self._looks >= seen + times, LIMIT)


class Watched:
    """A watchdog whose process does not really end."""

    def __init__(
        self,
        hang_timeout: float | None,
        *,
        waits: Callable[[], bool] = lambda: False,
        lapsed: Callable[[], str] = lambda: "",
    ) -> None:
        self.said: list[str] = []
        self.ended = threading.Event()
        self.clock = Clock()
        self.dog = Watchdog(
            hang_timeout,
            last_words=lambda why: self.said.append(f"words: {why}"),
            waits=waits,
            lapsed=lapsed,
            end=self._end,
            clock=self.clock,
        )
        self.dog.start()

    def require_rest_at(self, *times: float) -> None:
        for self.clock.now in times:
            self.clock.wait_until_looked_at()
        assert self.said == []

    def require_end_at(self, time: float, why: str) -> None:
        self.clock.now = time
        assert self.ended.wait(LIMIT)
        assert self.said == [f"words: {why}", why]

    def _end(self, why: str) -> None:
        self.said.append(why)
        self.ended.set()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_PERIOD", 0.001)


def test_no_progress_ends_it_once() -> None:
    watched = Watched(30)
    watched.require_rest_at(10.0, 29.9)
    watched.require_end_at(30.0, "no progress for 30 s")
    watched.dog.stop()
    assert len(watched.said) == 2


def test_progress_puts_it_off() -> None:
    watched = Watched(30)
    for time in (29.0, 58.0, 87.0):
        watched.require_rest_at(time)
        watched.dog.heartbeat()
    watched.dog.stop()


def test_who_waits_for_another_is_not_the_one_that_hangs() -> None:
    answers = [False, True, True]
    watched = Watched(30, waits=lambda: answers.pop())
    watched.require_rest_at(30.0, 60.0)
    watched.require_end_at(90.0, "no progress for 30 s")
    assert answers == []


def test_one_that_may_not_go_on_ends_whatever_its_progress() -> None:
    answers = ["others may write by now", "", ""]
    watched = Watched(None, lapsed=lambda: answers.pop())
    watched.require_end_at(0.0, "others may write by now")
    assert answers == []


def test_at_rest_no_progress_is_expected() -> None:
    watched = Watched(30)
    watched.dog.rest()
    watched.dog.end_within(1000, "enough")
    watched.require_rest_at(999.0)
    watched.require_end_at(1000.0, "enough")


def test_progress_does_not_put_off_the_end() -> None:
    watched = Watched(30)
    watched.dog.end_within(20, "the grace period is over")
    watched.clock.now = 19.0
    watched.dog.heartbeat()
    watched.require_end_at(20.0, "the grace period is over")


def test_without_a_timeout_only_the_end_counts() -> None:
    watched = Watched(None)
    watched.dog.heartbeat()
    watched.clock.now = 10.0**9
    watched.dog.end_within(5, "enough")
    watched.require_rest_at(10.0**9)
    watched.require_end_at(10.0**9 + 5, "enough")


@pytest.fixture(scope="module")
def hang(quick_python: list[str]) -> Callable[[str], Finished]:
    """Run a process that hangs in one way."""
    return lambda way: run([*quick_python, HANGING, way], limit=40)


def test_a_process_in_a_call_that_does_not_return(hang: Callable[[str], Finished]) -> None:
    finished = hang("step")
    assert finished.returncode == EXIT_STUCK == 76
    _, _, after = finished.output.partition("hangs\n")
    assert after.startswith("last words: no progress for 0.2 s\n")
    assert "[lightning_dist] watchdog: no progress for 0.2 s, exiting (76)\n" in after
    assert "in train_a_step" in after, "where its threads are"
    assert "in _watch" in after


WAYS = dict.fromkeys(
    ("words fail", "words hang", "nobody reads", "stderr closed"),
    "last words: no progress for 0.2 s\n",
) | {"told": "watchdog: SIGTERM, and the grace period is over, exiting (76)\n"}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_it_cannot_say_it_ends(way: str, hang: Callable[[str], Finished]) -> None:
    finished = hang(way)
    assert finished.returncode == EXIT_STUCK
    assert WAYS[way] in finished.output


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
@pytest.mark.parametrize(
    ("way", "killed"), [("orphaned", []), ("launched", ["rank"]), ("forked", ["rank"])]
)
def test_stopped_processes_are_killed_only_if_they_are_ranks_of_its_launcher(
    way: str, killed: list[str]
) -> None:
    assert end_of_orphan(way) == {"code": EXIT_STUCK, "killed": killed}


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
def test_a_rank_whose_launcher_has_died_is_asked_to_stop() -> None:
    assert end_of_orphan("listens") == {"code": EXIT_ASKED, "killed": []}


def end_of_orphan(way: str) -> Any:
    finished = run([sys.executable, HANGING.with_name("orphaned.py"), way], limit=60)
    return json.loads(finished.require_success().output.splitlines()[-1])
