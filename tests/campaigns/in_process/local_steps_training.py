"""A training in an ElasticLoop whose workers take local steps, see `worker.py`.

local_steps_training.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from recovering_loops import Net
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_dist import ElasticLoop, init_process_group, local_updates
from lightning_dist.elastic.loop.user_loop import UserLoop
from lightning_dist.elastic.recovery.local_steps import LocalStepRecovery
from lightning_dist.sync.local.outer_steps import LocalUpdates
from tests.campaigns.in_process.drawing import SAVES
from tests.campaigns.in_process.oracle import LOCAL_STEPS
from tests.campaigns.in_process.twin import norm_of
from tests.campaigns.in_process.worker import (
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
    plan, met, note = worker.plan, worker.strikes.met, worker.note
    # A RuntimeError may be that of a collective, so all restart while another rank is known to be
    # lost; and that is for a step here.
    worker.strikes.raises = ValueError
    net = Net()
    net.layers[1].weight.register_hook(lambda _: met("between buckets"))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    register_optimizer_step_pre_hook(lambda *_: met("after the vote"))
    init_process_group("gloo", recovery="in_process")
    settings = {**LOCAL_STEPS, **COMPRESSION, "codec": plan["codec"]}
    updates = local_updates(net, optimizer, **settings)
    apply = LocalUpdates._apply
    begun_in, begun_with, world_size = 0, 0, 0  # of the step under way

    def applying(of: LocalUpdates, *arguments: Any, **named: Any) -> None:
        apply(of, *arguments, **named)
        if named:  # the mean at the end is no outer step
            return
        norm = norm_of([*of.anchor.tensors.values()])
        note(outer=of.reducer.step, workers=of.metrics()["outer/workers"], norm=norm)
        recovery: Any = of.reducer._recovery
        again = of.reducer.generation != begun_with  # in the groups of another generation
        number = recovery.generations.member.generation.number if again else begun_in
        worker.committed(of.attempted, generation=number, world_size=world_size, net=net)

    LocalUpdates._apply = applying  # type: ignore[method-assign]
    with ElasticLoop(
        folder / "ckpt",
        loader=loader_of_samples(shuffle=True),
        state={"model": net, "optimizer": optimizer, "updates": updates},
        every_n_train_steps=SAVES,
        seed=SEED,
        recovery="in_process",
    ) as loop:
        recovery = loop._run.recovery
        assert isinstance(recovery, LocalStepRecovery)
        generations = recovery.generations
        torch.save([net.state_dict(), optimizer.state_dict()], folder / f"begin-{worker.name}.pt")
        note(joins=loop.steps)
        for epoch in loop.epochs(plan["epochs"]):
            for numbers, x in loop.batches():
                assert loop.micro_batch is not None
                begun = loop.steps
                if loop.micro_batch.begins_step:
                    begun_in = generations.member.generation.number
                    begun_with = updates.reducer.generation
                    world_size = loop._run.session.members.world_size
                    worker.begin(begun, generations, world_size=world_size)
                met("forward")
                factor = float(loop.scale_loss(torch.ones(())))
                loop.scale_loss(loss_of(net, x)).backward()
                ids = numbers.tolist() if loop.micro_batch.weight else []
                note(batch=begun + 1, ids=ids, factor=factor)
                if not loop.sync_gradients:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                note(taken=begun + 1, lr=RATE)
                updates.step()
                met("after the step")
                loop.step_done()
            if epoch < plan["epochs"] - 1:
                met("end of an epoch")
        updates.finish()
    worker.end(loop.steps, net)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
