"""The helper that all launches go through leaves nothing behind, whatever happens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import run

# A child in this session, and one in a session of its own, as the workers of torchrun are.
PARENT = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(120)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children))
print("started", flush=True)
time.sleep(120)
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
def test_at_the_limit_all_descendants_are_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    finished = run([sys.executable, "-c", PARENT, pids], limit=2)
    assert finished.returncode is None
    assert "started" in finished.output
    assert len(pids.read_text().split()) == 2
    assert not any(_alive(int(pid)) for pid in pids.read_text().split())
    with pytest.raises(AssertionError, match=r"killed at the limit(.|\n)*started"):
        finished.require_success()
