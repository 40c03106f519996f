"""Runs of two ranks under CommProfiler, one after the other: FOLDER CASE...

Ranks are forks of this process, which has imported everything. What a rank knows that its profile
has to find out goes to FOLDER/<case>/truth-<rank>.json.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

faulthandler.dump_traceback_later(110, exit=True)

import plotly.graph_objects as go  # noqa: E402
import profiled_frameworks  # noqa: E402
import profiled_odd  # noqa: E402
import profiled_planted  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from profiled_common import LIMIT  # noqa: E402

import lightning_dist  # noqa: E402
import lightning_dist.profiling.report.page  # noqa: E402
from lightning_dist.profiling.capture.session import Governor  # noqa: E402
from lightning_dist.profiling.report.figures import styled  # noqa: E402

CASES = {**profiled_planted.CASES, **profiled_odd.CASES, **profiled_frameworks.CASES}


def run_case(name: str, folder: Path, rank: int, ports: Any) -> None:
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(ports.get()))
    torch.set_num_threads(1)
    # Every step in detail: steps are so short that a busy machine records longer than they take.
    Governor.spent = lambda governor, nanoseconds, *, of: None
    dist.init_process_group("gloo", timeout=LIMIT)
    CASES[name](folder)
    dist.barrier()  # a rank that leaves with messages unread resets the connections of others


def main() -> None:
    fork = multiprocessing.get_context("fork")
    assert lightning_dist.__version__
    # Imports what figures and the page need, once.
    styled([go.Bar(x=[0]), go.Scatter(x=[0]), go.Table()], 100).to_json()
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name.replace(" ", "-")
        folder.mkdir()
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            GROUP_RANK="0",
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RUN_ID=name,
        )
        ports = fork.SimpleQueue()
        ranks = [fork.Process(target=run_case, args=(name, folder, r, ports)) for r in range(2)]
        for each in ranks:
            each.start()
        # Only now: a child of a process with a thread may find a lock that nobody opens any more.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        for _ in ranks:
            ports.put(store.port)
        for each in ranks:
            each.join(60)
            each.kill()
        del store
        print(name, [each.exitcode for each in ranks], flush=True)
        for number, each in enumerate(ranks):
            if each.exitcode:
                print((folder / f"output-{number}.txt").read_text()[-2000:], flush=True)


if __name__ == "__main__":
    main()
