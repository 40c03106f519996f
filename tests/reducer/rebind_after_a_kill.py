"""Three ranks; the last is killed in its second step, and the others take it without it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from feeding import FakeBucket, digest, feed
from torch import Tensor

from lightning_dist.exchange.channel import Channel
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings
from lightning_dist.topology import Topology

SHAPES = {"weight": (40, 48)}


def network(store: dist.Store, generation: int, rank: int, size: int) -> Network:
    channels = []
    for name in ("data", "control"):
        prefix = dist.PrefixStore(f"{generation} {name}", store)
        group = dist.ProcessGroup(prefix, rank, size)
        gloo = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=30))
        gloo._set_sequence_number_for_group()
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        channels.append(Channel(group))
    topology = Topology(tuple(f"host{r}" for r in range(size)), rank)
    return Network(channels[0], channels[1], topology, torch.device("cpu"))


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    parameter = torch.zeros(SHAPES["weight"])
    names: dict[Tensor, str] = {parameter: "weight"}
    settings = Settings.check("int8", min_compress_numel=0, commit="deferred")
    reducer = Reducer(names, settings=settings, network=network(store, 0, rank, size))
    buckets = DDPBuckets(reducer)

    def step(number: int) -> Tensor:
        flat = feed(rank, number, SHAPES)["weight"].flatten()
        return buckets.reduce(FakeBucket(flat, [parameter])).wait()

    step(0)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        step(1)
        raise SystemExit("the step should have failed")
    except RuntimeError:
        pass
    reducer.rebind(network(store, 1, rank, 2))
    mean = step(1)
    assert time.monotonic() - start < 8.0  # an executor is waited for up to 10 s
    reducer.close()
    print("after", digest([mean]), flush=True)
    os._exit(0)  # groups of a peer that is gone are not destroyed


if __name__ == "__main__":
    main()
