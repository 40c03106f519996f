"""A checkpoint that two ranks write together, beside one that one of them writes alone.

Within a round, in the same two processes: rank 0 alone copies the state into warm memory; rank 0
alone saves it; both save it as one folder of shards. Snapshots are blocking.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.checkpoint.ways import Training, copy
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.settings import CheckpointSettings

RANKS = 2
_TIMEOUT_S = 180.0


def measure_ranks(folder: Path, *, mb: float, rounds: int, seed: int) -> list[dict[str, float]]:
    """One dict of seconds per round: ``memcpy``, ``alone``, ``rank0``, ``rank1``."""
    folder.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id="checkpoint",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    of_ranks = elastic_launch(config, rank_main)(folder, mb, rounds, seed)
    listed: list[dict[str, float]] = of_ranks[0]
    return listed


def rank_main(folder: Path, mb: float, rounds: int, seed: int) -> list[dict[str, float]]:
    """One rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    listed = list(_rounds(folder, mb, rounds, seed))
    dist.barrier()
    dist.destroy_process_group()
    return listed


def _rounds(folder: Path, mb: float, rounds: int, seed: int) -> Iterator[dict[str, float]]:
    rank = dist.get_rank()
    training = Training(mb, seed=seed)
    copying = copy(training)
    settings = CheckpointSettings(snapshot="blocking")
    alone = Checkpointer(settings)
    together = Checkpointer(settings, group=dist.group.WORLD)
    for name, checkpointer in (("alone", alone), ("together", together)):
        checkpointer.watch([training.optimizer])
        if rank == 0:
            checkpointer.open(str(folder / name))
    dist.barrier()  # rank 0 opens a folder before the others
    if rank > 0:
        together.open(str(folder / "together"))

    def save_alone() -> None:
        alone.save(training.state(), str(folder / "alone/saved.ckpt"), step=index)

    def save_together() -> None:
        target = str(folder / "together/saved.ckpt")
        together.save(training.state(), target, step=index, sharded=True)

    for index in range(rounds + 1):  # the first warms up
        seconds = {}
        if rank == 0:
            seconds["memcpy"] = _seconds(lambda: copying.save(folder))
            seconds["alone"] = _seconds(save_alone)
            alone.wait()
            os.remove(folder / "alone/saved.ckpt")
            os.sync()
        dist.barrier()
        stall = _seconds(save_together)
        together.wait()
        stalls = [0.0] * RANKS
        dist.all_gather_object(stalls, stall)
        if rank == 0:
            shutil.rmtree(folder / "together/saved.ckpt")
            os.sync()
        if index:
            yield seconds | {f"rank{number}": value for number, value in enumerate(stalls)}
    alone.close()
    together.close()


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
