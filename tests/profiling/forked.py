"""Ranks that are forks of one script: what takes time is imported once, and Lightning is not."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)


def run_ranks(rank_main: Callable[[], None], size: int) -> None:
    """Call it as every rank of a gloo world; exit with 1 if any of them has failed.

    As one rank of a launcher where that has set the variables of torchrun.
    """
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        _run(rank_main, None, None)
        return
    fork = multiprocessing.get_context("fork")
    os.environ.update(
        MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(size), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    ports = fork.SimpleQueue()
    ranks = [fork.Process(target=_run, args=(rank_main, rank, ports)) for rank in range(size)]
    for each in ranks:
        each.start()
    # Only now: a child of a process with a thread may find a lock that nobody opens any more.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    for _ in ranks:
        ports.put(store.port)
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


def say(**facts: Any) -> None:
    """Print a line of JSON; in one call, or else ranks write into each other's lines."""
    os.write(1, (json.dumps(facts) + "\n").encode())


def _run(rank_main: Callable[[], None], rank: int | None, ports: Any) -> None:
    if rank is not None:
        os.environ.update(RANK=str(rank), MASTER_PORT=str(ports.get()))
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank_main()
    dist.destroy_process_group()
