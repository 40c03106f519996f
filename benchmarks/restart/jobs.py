"""Jobs on this machine: started, and ended with everything that they have started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.harness.launch import REPOSITORY


def start(words: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start Python with these arguments, with one thread a process; ``output`` is appended to."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def end(job: subprocess.Popen[bytes]) -> None:
    """Kill the launcher first, so that it starts nothing anew; ranks have sessions of their own."""
    if job.poll() is None:
        ranks = psutil.Process(job.pid).children(recursive=True)
        job.kill()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    job.wait()
