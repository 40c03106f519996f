"""Workers that die are replaced by the launcher, one by one: real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from processes import environment_of, kill_tree

WORKER = Path(__file__).parent / "recovering.py"
LIMIT = 100.0
FAR = "1000"
"""Seconds of a timeout that is not to come."""

T = TypeVar("T")
Generations = dict[str, Any]


def wait_for(found: Callable[[], T | None], what: str) -> T:
    end = time.monotonic() + LIMIT
    while (thing := found()) is None:
        assert time.monotonic() < end, f"{what} has not come"
        time.sleep(0.01)
    return thing


class Job:
    """A launcher of the worker."""

    def __init__(self, python: Sequence[str], folder: Path, *options: str, **environment: str):
        self.folder = folder
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        settings = {f"LIGHTNING_DIST_{name}": value for name, value in environment.items()}
        words = ["-m", "lightning_dist.elastic.agent", "--monitor-interval=0.05", *options]
        self._process = subprocess.Popen(
            [*python, *words, "--no-python", *python, str(WORKER), str(folder)],
            env=environment_of({"LIGHTNING_DIST_BEAT_TIMEOUT": FAR, **settings}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def workers(self) -> dict[str, int]:
        """Processes of all workers that have come, by name; of a name the last to come."""
        found = sorted(self.folder.glob("*.*.*.*"), key=lambda path: path.stat().st_ctime)
        return {path.stem: int(path.suffix[1:]) for path in found}

    def generations(self, name: str) -> list[Generations]:
        """In which the last process of that name has been."""
        lines = (self.folder / f"{name}.{self.workers()[name]}").read_text().splitlines(True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, *members: str, number: int | None = None) -> Generations:
        """The generation that all members, and only they, are in."""

        def found() -> Generations | None:
            assert self._process.poll() is None, self.output
            there = self.workers()
            if not {*members} <= {*there}:
                return None
            last = [(self.generations(name) or [{"number": -1}])[-1] for name in members]
            if any(each.get("members") != [*members] for each in last):
                return None
            if len({each["number"] for each in last}) > 1:
                return None
            return last[0] if number in (None, last[0]["number"]) else None

        try:
            return wait_for(found, f"a generation of {members}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-4000:]}") from None

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.workers()[name], number)

    def wait(self) -> int:
        return self._process.wait(LIMIT)

    def end(self) -> None:
        """Let all workers end, and the launcher after them."""
        (self.folder / "end").touch()
        assert self.wait() == 0, self.output

    def close(self) -> None:
        if self._process.poll() is None:
            kill_tree(self._process.pid)
        self._process.wait()
        self._log.close()


@pytest.fixture
def start(tmp_path: Path, quick_python: list[str]) -> Iterator[Callable[..., Job]]:
    """Start a launcher of one node with three workers, or with the given options."""
    jobs: list[Job] = []

    def start(*options: str, **environment: str) -> Job:
        folder = tmp_path / "workers"
        folder.mkdir(exist_ok=True)
        options = options or ("--standalone", "--nproc-per-node=3", "--max-restarts=3")
        jobs.append(Job(quick_python, folder, *options, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_that_is_killed_is_replaced(victim: int, start: Callable[..., Job]) -> None:
    """The others are not touched, and have a generation before that."""
    job = start()
    names = ["0.0.0", "0.1.0", "0.2.0"]
    job.wait_for(*names)
    before = job.workers()
    killed, again = names[victim], f"0.{victim}.1"
    job.signal(killed, signal.SIGKILL)
    after = job.wait_for(*sorted([again, *(name for name in names if name != killed)]))
    assert after["number"] == 2
    left = names[victim - 1]
    made = job.generations(left)[1]
    assert made["members"] == [name for name in names if name != killed]
    assert {name: job.workers()[name] for name in before} == before
    job.end()
    assert f"worker {killed} has ended: SIGKILL" in job.output
    assert f"worker {again} is started, 2 more may be" in job.output
