"""The helper that all launches go through leaves nothing behind, whatever happens."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import processes
import pytest
from forks import fork_server
from processes import kill_tree, readable, run

# A child in this session, and one in a session of its own, as the workers of torchrun are.
PARENT = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(120)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print("started", flush=True)
open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children) + " all")
time.sleep(120)
"""

# Starts a worker wherever one ends.
LAUNCHER = """
import os, signal, subprocess, sys

def start(*_):
    worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(worker.pid, flush=True)

signal.signal(signal.SIGCHLD, start)
for _ in range(20):
    start()
print("all", flush=True)
while True:
    signal.pause()
"""


def _ends(pid: int) -> bool:
    """Whether it has ended, or does soon: a process that was killed may still be about to."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return readable(process, 30)
    finally:
        os.close(process)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
def test_at_the_limit_all_descendants_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit comes when both children have started, however long that takes."""
    noted, usual = tmp_path / "pids", processes.readable

    def readable(handle: int, limit: float) -> bool:
        while not noted.exists() or not noted.read_text().endswith("all"):
            assert not usual(handle, 0)
            os.sched_yield()
        return usual(handle, 0.01 if limit > 10 else limit)

    monkeypatch.setattr(processes, "readable", readable)
    finished = run([sys.executable, "-c", PARENT, noted], limit=60)
    assert finished.returncode is None
    assert "started" in finished.output
    pids = noted.read_text().split()[:-1]
    assert len(pids) == 2
    assert all(_ends(int(pid)) for pid in pids)
    with pytest.raises(AssertionError, match=r"killed at the limit(.|\n)*started"):
        finished.require_success()


def test_a_launcher_starts_no_worker_anew_while_it_is_killed(tmp_path: Path) -> None:
    """It starts one wherever one ends, in a session of its own."""
    output = tmp_path / "output"
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER], stdout=file, start_new_session=True
        )
    try:
        while not output.read_text().endswith("all\n"):
            assert launcher.poll() is None
        handle = os.pidfd_open(launcher.pid)
        kill_tree(launcher.pid)
        assert processes.readable(handle, 10)
        os.close(handle)
        workers = [int(word) for word in output.read_text().split() if word != "all"]
        assert [pid for pid in workers if _runs(pid)] == []
        assert len(workers) == 20
    finally:
        launcher.wait()
        for word in output.read_text().split():
            with suppress(ValueError, ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether a process is there, and not one that nobody has waited for."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_fork_server_that_fails_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_module.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with fork_server("wrong_module") as python:
        done = run([*python, "-c", "pass"], limit=60)
    assert done.returncode == 1
    assert done.output.startswith(("the fork server is gone", "Traceback"))
