"""Run the scenarios of some modules, one after the other, on every rank of a torchrun world.

    torchrun --nproc-per-node=2 run_scenarios.py FOLDER MODULE... [-- NAME...]

Rank R leaves FOLDER/NAME.R.pt for every scenario: ``{"facts": ...}`` or ``{"error": traceback}``.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

LIMIT_SECONDS = 150
faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)  # before imports that may be slow

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from scenarios.catalogue import SCENARIOS, process_group, rank, world_size  # noqa: E402


def main(folder: Path, modules: list[str], chosen: list[str]) -> None:
    os.environ["SCENARIO_FOLDER"] = str(folder)
    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(f"scenarios.{module}")
    store = dist.TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        world_size(),
        is_master=False,  # the agent of torchrun serves it
        timeout=timedelta(seconds=60),
    )
    # The limit of a group is for ranks that have imported all they need, which some do in forks
    # that have it already, and others do not.
    store.set(f"here/{rank()}", "")
    everybody = [f"here/{each}" for each in range(world_size())]
    store.wait(everybody, timedelta(seconds=LIMIT_SECONDS))
    homes = {f"scenarios.{module}" for module in modules}
    own = [name for name, function in SCENARIOS.items() if function.__module__ in homes]
    for name in chosen or own:
        start = time.perf_counter()
        torch.manual_seed(0)
        try:
            with process_group(dist.PrefixStore(name, store), rank(), world_size()):
                result = {"facts": SCENARIOS[name]()}
        except Exception:
            result = {"error": traceback.format_exc()}
        torch.save(result, folder / f"{name}.{rank()}.pt")
        outcome = "failed" if "error" in result else "done"
        print(f"{name} {outcome} after {time.perf_counter() - start:.2f} s", flush=True)


if __name__ == "__main__":
    arguments, _, names = " ".join(sys.argv[2:]).partition("--")
    main(Path(sys.argv[1]), arguments.split(), names.split())
