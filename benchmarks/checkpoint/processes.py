"""Measurements that take processes of their own: memory of a save, and two ranks that save.

Memory: every few milliseconds that of a trainer and of all processes that it has started is added
up, from outside: the proportional set size of each (/proc/PID/smaps_rollup) without shared memory,
and once the shared memory of the process that has most of it (RssShmem; the others map the same).
What counts is the highest sum during two saves, above that when the training and the imports were
there. The page cache is not in it.

Ranks: within a round, in the same two processes, rank 0 alone copies the state into warm memory;
rank 0 alone saves it; both save it as one folder of shards. Snapshots are blocking.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from benchmarks.checkpoint.ways import ROWS, Training, copy
from benchmarks.harness.launch import REPOSITORY
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.settings.run import CheckpointSettings

_INTERVAL_S = 0.005
_SAVES = 2


def memory_growth(name: str, *, mb: float, seed: int, folder: Path) -> int:
    """Bytes by which two saves of a row raise the memory of its processes."""
    folder.mkdir()
    arguments = [name, str(mb), str(seed), str(folder)]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.checkpoint.processes", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        child.stdout.readline()  # it is ready
        peaks, done = [_tree_nbytes(child.pid)], threading.Event()

        def watch() -> None:
            while not done.wait(_INTERVAL_S):
                peaks.append(_tree_nbytes(child.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        print("save", file=child.stdin, flush=True)
        answer = child.stdout.readline()
        done.set()
        watcher.join()
    if answer != "done\n":
        raise RuntimeError(f"{name}: the process that saves failed")
    return max(peaks) - peaks[0]


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


def _save_when_told(name: str, mb: float, seed: int, folder: Path) -> None:
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


def save_in_ranks(*, folder: str, mb: float, rounds: int, seed: int) -> Iterator[dict[str, float]]:
    """Seconds of every round: stalls as ``rank0``, ``rank1``; on rank 0 ``memcpy``, ``alone``."""
    rank = dist.get_rank()
    training = Training(mb, seed=seed)
    copying = copy(training)
    settings = CheckpointSettings(snapshot="blocking")
    alone = Checkpointer(settings)
    together = Checkpointer(settings, group=dist.group.WORLD)
    for name, checkpointer in (("alone", alone), ("together", together)):
        checkpointer.watch([training.optimizer])
        if rank == 0:
            checkpointer.open(f"{folder}/{name}")
    dist.barrier()  # rank 0 opens a folder before the others
    if rank > 0:
        together.open(f"{folder}/together")

    def save_alone() -> None:
        alone.save(training.state(), f"{folder}/alone/saved.ckpt", step=index)

    def save_together() -> None:
        target = f"{folder}/together/saved.ckpt"
        together.save(training.state(), target, step=index, sharded=True)

    for index in range(rounds + 1):  # the first warms up
        seconds = {}
        if rank == 0:
            seconds["memcpy"] = _seconds(lambda: copying.save(Path(folder)))
            seconds["alone"] = _seconds(save_alone)
            alone.wait()
            os.remove(f"{folder}/alone/saved.ckpt")
            os.sync()
        dist.barrier()
        stall = _seconds(save_together)
        together.wait()
        stalls = [0.0] * dist.get_world_size()
        dist.all_gather_object(stalls, stall)
        if rank == 0:
            shutil.rmtree(f"{folder}/together/saved.ckpt")
            os.sync()
        if index:
            yield seconds | {f"rank{number}": value for number, value in enumerate(stalls)}
    alone.close()
    together.close()


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    _save_when_told(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
