"""Rank 1 is killed after its last step, before the ranks compare clocks: FOLDER."""

import faulthandler
import os
import sys

faulthandler.dump_traceback_later(110, exit=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from comm_profiles import ddp, profiled, train  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo")
with profiled(model := ddp(), sys.argv[1], print_summary=True):
    train(model)
    if dist.get_rank() == 1:
        os._exit(0)
sys.stdout.flush()
os._exit(0)  # nobody is there for the end of the group
