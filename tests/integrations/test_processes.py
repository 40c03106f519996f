"""The helper that all launches go through leaves nothing behind, whatever happens."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run

# A child in this session, and one in a session of its own, as the workers of torchrun are.
PARENT = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(120)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print("started", flush=True)
open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children) + " all")
time.sleep(120)
"""


def _ends(pid: int) -> bool:
    """Whether it has ended, or does soon: a process that was killed may still be about to."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([process], [], [], 30)
    os.close(process)
    return bool(ended)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
def test_at_the_limit_all_descendants_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit comes when both children have started, however long that takes."""
    noted, usual = tmp_path / "pids", subprocess.Popen.wait

    def wait(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return int(usual(process))
        while not noted.exists() or not noted.read_text().endswith("all"):
            assert process.poll() is None
            os.sched_yield()
        return int(usual(process, 0.01))

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    finished = run([sys.executable, "-c", PARENT, noted], limit=60)
    assert finished.returncode is None
    assert "started" in finished.output
    pids = noted.read_text().split()[:-1]
    assert len(pids) == 2
    assert all(_ends(int(pid)) for pid in pids)
    with pytest.raises(AssertionError, match=r"killed at the limit(.|\n)*started"):
        finished.require_success()
