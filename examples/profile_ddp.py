"""Where the time of communication goes, in a loop of your own.

    torchrun --nproc-per-node 2 examples/profile_ddp.py [ddp | int8 | powersgd | ...]

Prints the parts of a step and what is waited for; comm_profile/run-0/report.html has the pictures.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import CommProfiler, compress_ddp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("codec", nargs="?", default="int8", help="or ddp, for none of ours")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default="comm_profile")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    if arguments.codec != "ddp":
        compress_ddp(model, arguments.codec, compile_kernels=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with CommProfiler(model, dirpath=arguments.folder):
        for _ in range(arguments.steps):
            model(torch.randn(32, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
