"""Two ranks on this host, as a proof that any work."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from lightning_dist.cli.doctor_finding import Finding

RANKS = 2
BOUND = 60.0
"""Seconds."""

_PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
rank, size, store, seconds = sys.argv[1:]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size),
    timeout=timedelta(seconds=float(seconds)),
)
total = torch.tensor([int(rank) + 1])
dist.all_reduce(total)
assert total.item() == sum(range(1, int(size) + 1)), f"1 + 2 was {total.item()}"
dist.destroy_process_group()
"""


def two_ranks(environ: Mapping[str, str], *, bound: float = BOUND) -> Finding:
    """Whether two processes with these variables form a gloo group and add two numbers."""
    name = f"{RANKS} ranks here"
    begin = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
        processes = []
        for rank, log in enumerate(logs):
            words = [str(rank), str(RANKS), str(folder / "store"), str(bound / 2)]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *words],
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        fix = "GLOO_SOCKET_IFNAME=lo lightning-dist doctor  # does it work on loopback?"
        try:
            for process in processes:
                process.wait(max(0.0, begin + bound - time.monotonic()))
        except subprocess.TimeoutExpired:
            what = f"they did not find each other within {bound:.0f} s"
            return Finding(name, "error", what, fix)
        for rank, process in enumerate(processes):
            if process.returncode:
                said = logs[rank].read_text(errors="replace").strip().splitlines()
                what = f"rank {rank}: {said[-1] if said else f'exit code {process.returncode}'}"
                return Finding(name, "error", what, fix)
    return Finding(name, "ok", f"gloo works; {time.monotonic() - begin:.1f} s")
