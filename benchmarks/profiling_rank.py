"""One rank of benchmarks/profiling.py: [{"case": NAME, "folder": FOLDER, "arguments": {...}}, ...].

The cases are done one after the other in one process group. A profile goes to FOLDER/run-<n>, and
what this rank knows that the profile has to find out, to FOLDER/truth-<rank>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.profiling_rank_cost import cost
from benchmarks.profiling_rank_hooks import hooks
from benchmarks.profiling_rank_links import clocks, wire
from benchmarks.profiling_rank_planted import codec_time, skew

CASES: dict[str, Callable[..., Any]] = {
    "skew": skew,
    "codec": codec_time,
    "wire": wire,
    "clocks": clocks,
    "cost": cost,
    "hooks": hooks,
}
"""Each is called with the folder and the arguments, and returns what this rank knows."""
_TIMEOUT = timedelta(seconds=120)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    for each in json.loads(sys.argv[1]):
        folder = Path(each["folder"])
        truth = CASES[each["case"]](folder, **each["arguments"])
        (folder / f"truth-{dist.get_rank()}.json").write_text(json.dumps(truth))
        dist.barrier()
        if dist.get_rank() == 0:
            print(each["case"], each["arguments"], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
