"""Groups of one process, on an accelerator, in one generation after the other.

    accelerated_groups.py {cuda,sim}

Each is used, aborted while a collective is under way, and used again, which must not work.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from lightning_dist.elastic.recovery.connections import Connections
from lightning_dist.elastic.recovery.generations import GenerationGroups, init_alone
from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.elastic.recovery.protocol import Generation, Worker

GENERATIONS = 3


def main(kind: str) -> None:
    backend = f"cpu:gloo,{kind}:nccl"
    if kind == "sim":
        from simulated_device.device import register_backend

        backend = register_backend()
    device, name = torch.device(kind, 0), str(Worker(0, 0, 0))
    torch.get_device_module(kind).set_device(device)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = RecoveryEnvironment("127.0.0.1", server.port, Worker.parse(name))
    init_alone(environment, backend=backend, timeout=timedelta(seconds=60))
    connections = Connections()
    groups = GenerationGroups(environment, lambda key, value, names: [value], connections)
    for number in range(GENERATIONS):
        groups.enter(Generation(number, members=(name,)))
        of_generation = dist.group.WORLD, groups.new(backend=groups.backend)
        for group in of_generation:
            for at in (device, torch.device("cpu")):
                values = torch.arange(4.0, device=at)
                dist.all_reduce(values, group=group)
                assert values.tolist() == [0.0, 1.0, 2.0, 3.0]
            if kind == "cuda":
                torch.cuda._sleep(1 << 28)
            dist.all_reduce(values.to(device), group=group, async_op=True)
        connections.shut()
        for group in of_generation:
            try:
                dist.all_reduce(torch.ones(4, device=device), group=group)
            except RuntimeError as error:
                print(f"generation {number}: {str(error)[:200]}")
            else:
                sys.exit(f"a collective works after the abort of generation {number}")
        torch.get_device_module(kind).synchronize(device)
    print(f"connected {GENERATIONS} times")


if __name__ == "__main__":
    main(sys.argv[1])
