"""A training in an ElasticLoop around DDP, see `worker.py`; without a launcher, of one process.

loop_training.py FOLDER
"""

import sys
from pathlib import Path

import torch
from recovering_loops import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_dist import ElasticLoop, compress_ddp, init_process_group
from lightning_dist.elastic.loop.user_loop import UserLoop
from tests.campaigns.in_process.drawing import RANKS, SAVES
from tests.campaigns.in_process.worker import (
    BUCKET_CAP_MB,
    COMPRESSION,
    MOMENTUM,
    RATE,
    SEED,
    Worker,
    loader_of_samples,
    loss_of,
)


def train(folder: Path) -> None:
    worker = Worker(folder, UserLoop)
    plan, met, recovers = worker.plan, worker.strikes.met, bool(worker.name)
    net = Net()
    model: nn.Module = net
    if recovers:
        init_process_group("gloo", recovery="in_process")
        model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_CAP_MB)
        compress_ddp(model, plan["codec"], **COMPRESSION)
    net.layers[1].weight.register_hook(lambda _: met("between buckets"))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    register_optimizer_step_pre_hook(lambda *_: met("after the vote"))
    with ElasticLoop(
        folder / ("ckpt" if recovers else "ckpt-alone"),
        loader=loader_of_samples(shuffle=True),
        state={"model": model, "optimizer": optimizer},
        every_n_train_steps=SAVES,
        gradient_accumulation_steps=1 if recovers else RANKS,
        seed=SEED,
        recovery="in_process" if recovers else "restart",
    ) as loop:
        recovery = loop._run.recovery
        generations = None if recovery is None else recovery.generations
        ids: list[int] = []
        for epoch in loop.epochs(plan["epochs"]):
            for numbers, x in loop.batches():
                assert loop.micro_batch is not None
                begun, ids = loop.steps, [] if loop.micro_batch.begins_step else ids
                number = -1 if generations is None else generations.member.generation.number
                world_size = loop._run.session.members.world_size
                worker.begin(begun, generations, world_size=world_size)
                met("forward")
                loss = loss_of(model, x)
                if loop.micro_batch.weight:
                    ids = ids + numbers.tolist()
                if loop.sync_gradients:
                    worker.note(computed=begun + 1, ids=ids, generation=number)
                loop.scale_loss(loss).backward()
                if not loop.sync_gradients:
                    continue
                optimizer.step()
                if recovery is None or not recovery.is_given_up:
                    worker.committed(begun + 1, generation=number, world_size=world_size, net=net)
                met("after the step")
                optimizer.zero_grad()
                loop.step_done()
            if epoch < plan["epochs"] - 1:
                met("end of an epoch")
    worker.end(loop.steps, net)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
