"""Losses of short trainings with every codec, on two ranks, as JSON: what versions must have alike.

python -m tests.campaigns.versions.losses
"""

import json
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import CODECS, compress_ddp

RANKS = 2
STEPS = 4
PLAIN = "DDP"


def train(codec: str, rank: int, **settings: Any) -> list[float]:
    """Losses of this rank, and the sum of the weights after the last step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64)), bucket_cap_mb=0.02
    )
    if codec != PLAIN:
        compress_ddp(model, codec, min_compress_numel=0, compile_kernels=False, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(16, 96, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.stack([each.double().sum() for each in model.parameters()]).sum()
    everywhere = [torch.zeros_like(weights) for _ in range(RANKS)]
    dist.all_gather(everywhere, weights)
    assert everywhere[0] == everywhere[1], f"{codec}: the ranks differ"
    return [*losses, weights.item()]


def rank(number: int, folder: str) -> None:
    """All trainings of one rank; the first one prints."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=number, world_size=RANKS)
    found = {codec: train(codec, number) for codec in (PLAIN, *CODECS)}
    found["delay=1"] = train("int8", number, delay=1)
    assert found["none"] == found[PLAIN], "codec none is not DDP"
    if number == 0:
        print("LOSSES" + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder,), nprocs=RANKS)  # type: ignore[no-untyped-call]
