"""Host memory that a save takes: each row in a fresh process, watched from outside.

Every few milliseconds the memory of the trainer and of all processes that it has started is added
up: the proportional set size of each (/proc/PID/smaps_rollup) without shared memory, and once the
shared memory of the process that has most of it (RssShmem; the others map the same). What counts is
the highest sum during two saves, above that when the training and the imports were there. The page
cache is not in it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import psutil

from benchmarks.harness.launch import REPOSITORY

_INTERVAL_S = 0.005
_SAVES = 2


def memory_growth(name: str, *, mb: float, seed: int, folder: Path) -> int:
    """Bytes by which two saves of a row raise the memory of its processes."""
    folder.mkdir()
    arguments = [name, str(mb), str(seed), str(folder)]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.checkpoint.memory", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        _expect(child.stdout.readline(), "ready")
        before = _tree_nbytes(child.pid)
        peaks, done = [before], threading.Event()
        watcher = threading.Thread(target=_watch, args=(child.pid, peaks, done))
        watcher.start()
        print("save", file=child.stdin, flush=True)
        answer = child.stdout.readline()
        done.set()
        watcher.join()
        _expect(answer, "done")
    return max(peaks) - before


def _watch(pid: int, peaks: list[int], done: threading.Event) -> None:
    while not done.wait(_INTERVAL_S):
        peaks.append(_tree_nbytes(pid))


def _tree_nbytes(root: int) -> int:
    processes = [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    private, shared = zip(*map(_nbytes, processes), strict=True)
    return sum(private) + max(shared)


def _nbytes(pid: int) -> tuple[int, int]:
    """Bytes of a process without and of shared memory; of what it shares otherwise, its part."""
    fields: dict[str, int] = {}
    try:
        for name in ("smaps_rollup", "status"):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.endswith(" kB"):
                    fields[line.partition(":")[0]] = int(line.split()[-2]) * 1024
        return fields["Pss"] - fields["Pss_Shmem"], fields["RssShmem"]
    except (OSError, KeyError):  # it has ended
        return 0, 0


def _expect(line: str, word: str) -> None:
    if line.strip() != word:
        raise RuntimeError(f"the process should have said {word!r} and said {line!r}")


def _save_when_told(name: str, mb: float, seed: int, folder: Path) -> None:
    import torch

    from benchmarks.checkpoint.ways import ROWS, Training

    torch.set_num_threads(1)
    row = ROWS[name](Training(mb, seed=seed))
    print("ready", flush=True)
    sys.stdin.readline()
    row.open(folder)
    for index in range(_SAVES):
        row.save(folder / f"saved{index}")
        row.wait()
    print("done", flush=True)
    row.close()


if __name__ == "__main__":
    _save_when_told(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
