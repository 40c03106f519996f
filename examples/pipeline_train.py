"""Pipeline parallelism: two stages in two replicas, with compressed gradients between replicas.

    torchrun --nproc-per-node 4 examples/pipeline_train.py

On a cluster let the ranks of a node be the stages of one pipeline, so that gradients alone cross
between nodes.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from byte_gpt.data import StdlibBytes
from byte_gpt.model import BYTES, Block, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import compress_ddp

WIDTH, HEADS, MICRO_BATCHES = 128, 4, 4


class FirstStage(nn.Module):
    """Bytes ``(B, T)`` -> the stream ``(B, T, WIDTH)``."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(torch.zeros(context, WIDTH))
        self.block = Block(WIDTH, n_heads=HEADS)

    def forward(self, tokens: Tensor) -> Tensor:
        stream: Tensor = self.block(self.embedding(tokens) + self.position)
        return stream


class LastStage(nn.Module):
    """The stream ``(B, T, WIDTH)`` -> logits ``(B, T, 256)``."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, n_heads=HEADS)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(stream)))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")  # "nccl" on GPUs, and the stages on the local one
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, place = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    data = StdlibBytes()
    data.setup("fit")
    sampler = DistributedSampler(data.train_set, num_replicas=2, rank=replica, drop_last=True)
    loader = DataLoader(data.train_set, batch_size=data.batch_size, sampler=sampler, drop_last=True)

    module = FirstStage(data.train_set.context) if place == 0 else LastStage()
    model = DistributedDataParallel(module, process_group=mesh.get_group("replica"))
    gradients = compress_ddp(model, arguments.codec)
    # With the shapes of a micro-batch: to find them the stage would go through DDP once more.
    tokens = torch.empty(data.batch_size // MICRO_BATCHES, data.train_set.context, dtype=torch.long)
    stream, logits = (
        torch.empty(*tokens.shape, last, requires_grad=True) for last in (WIDTH, BYTES)
    )
    shapes = (tokens, stream) if place == 0 else (stream, logits)
    group = mesh.get_group("stage")
    stage = PipelineStage(model, place, 2, torch.device("cpu"), *shapes, group=group)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, window in zip(range(arguments.steps), loader, strict=False):
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(window[:, :-1])
        else:
            schedule.step(target=window[:, 1:], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and replica == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.3f}", flush=True)
    if losses and replica == 0:
        print(f"{gradients.comm_stats()['ratio']:.1f} times fewer bytes between replicas")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
