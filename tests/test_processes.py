"""Processes of tests are ended with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from processes import kill_tree, readable

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
        assert readable(handle, 10)
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
