"""A loop in local steps whose workers die where they are told to; the others go on.

    recovering_local_steps.py FOLDER SETTINGS

SETTINGS is JSON: ``codec``, ``faults``, ``lost``, ``joins``, ``ranks`` and ``saves`` as of
``recovering_loops.py``; ``fabric``: it has made model and optimizer; ``lag`` as ``[worker, step]``:
it takes this step only when it knows that another one is lost: ``victim``, which dies a step
later; ``awaits`` as ``[worker, step]``: it takes this step only when a newcomer waits; ``dies`` as
``[worker, generation]``: in its first step there, for which those that are behind give it time;
``updates``: more settings of these.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recovering_loops import (
    BATCH,
    EPOCHS,
    Net,
    Samples,
    await_newcomers,
    await_true,
    begin,
    digest,
    written,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist import ElasticLoop, init_process_group, local_updates
from lightning_dist.elastic.loop.user_loop import UserLoop
from lightning_dist.elastic.recovery.local_steps import LocalStepRecovery
from lightning_dist.elastic.recovery.protocol import Keys
from lightning_dist.sync.local.outer_steps import LocalUpdates
from tests.campaigns.in_process.twin import norm_of

SETTINGS: dict[str, Any] = {
    **{"method": "diloco", "sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.6},
    **{"overlap_steps": 0, "min_compress_numel": 0, "compile_kernels": False},
}


def of_fabric(
    module: nn.Module, sgd: torch.optim.Optimizer, settings: dict[str, Any]
) -> tuple[Any, Any, LocalUpdates, Callable[[], list[int]]]:
    """Model, optimizer, updates, and how Fabric tells rank and world size."""
    from lightning.fabric import Fabric

    from lightning_dist.fabric import LocalUpdateStrategy

    strategy = LocalUpdateStrategy(**settings)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(module, sgd)
    assert strategy.updates is not None
    return model, optimizer, strategy.updates, lambda: [fabric.global_rank, fabric.world_size]


def await_beats(recovery: LocalStepRecovery, worker: str, generation: int) -> None:
    """Wait until a worker has had some heartbeats in a generation: as far as it comes alone."""
    seen = set[bytes]()

    def has_been() -> bool:
        beat = recovery.generations.member.store.get(Keys.beat(worker))
        if beat.partition(b" ")[2].startswith(b"%d." % generation):
            seen.add(beat.partition(b" ")[0])
        return len(seen) > 3

    await_true(has_been, f"{worker} beats in generation {generation}")


def train(folder: Path, told: dict[str, Any]) -> None:
    own = os.environ["LIGHTNING_DIST_WORKER"]
    faults = begin(folder, told, UserLoop)
    module = Net()
    sgd = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.1, total_iters=20)
    init_process_group("gloo", recovery="in_process")
    settings = {**SETTINGS, "codec": told.get("codec", "none"), **told.get("updates", {})}
    model, optimizer, ranks = module, sgd, list[int]
    if fabric := told.get("fabric", False):
        model, optimizer, updates, ranks = of_fabric(module, sgd, settings)
    else:
        updates = local_updates(module, sgd, **settings)
    log = (folder / f"{own}.jsonl").open("a", buffering=1)

    def note(**facts: Any) -> None:
        print(written(**facts), file=log)

    apply = LocalUpdates._apply

    def applying(of: LocalUpdates, *arguments: Any, **named: Any) -> None:
        apply(of, *arguments, **named)
        if not named:  # the mean at the end is no outer step
            anchor = [*of.anchor.tensors.values()]
            workers = of.metrics()["outer/workers"]
            note(outer=of.reducer.step, workers=workers, norm=norm_of(anchor))

    LocalUpdates._apply = applying  # type: ignore[method-assign]
    with ElasticLoop(
        folder / "ckpt",
        loader=DataLoader(Samples(), batch_size=BATCH, shuffle=True),
        state={
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "updates": updates,
        },
        every_n_train_steps=told.get("saves", 4),
        seed=5,
        recovery="in_process",
    ) as loop:
        recovery = loop._run.recovery
        assert isinstance(recovery, LocalStepRecovery)
        faults.lifecycle = loop._run.session.lifecycle
        torch.save([module.state_dict(), sgd.state_dict()], folder / f"begin-{own}.pt")
        note(joins=loop.steps)
        for epoch in loop.epochs(EPOCHS):
            for ids, x in loop.batches():
                micro_batch, begun = loop.micro_batch, loop.steps
                assert micro_batch is not None
                if micro_batch.begins_step:
                    world = loop._run.session.members.world_size
                    if begun >= told.get("joins", 1 << 20):
                        await_newcomers(
                            recovery.generations,
                            missing=told.get("ranks", 3) - world,
                            heartbeat=loop.heartbeat,
                        )
                    slow, at = told.get("lag", ("", -1))
                    if (own, begun) == (slow, at):
                        await_true(lambda: recovery.is_broken, "a rank is lost")
                    if (own, begun) == (told.get("victim", "0.1.0"), at + 1) and slow:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if [own, begun] == told.get("awaits"):
                        await_newcomers(recovery.generations, missing=1)
                    number = recovery.generations.member.generation.number
                    if recovery.is_behind and "dies" in told:
                        await_beats(recovery, "0.0.0", number)
                    if [own, number] == told.get("dies"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    faults.begin(begun, world=world, is_broken=lambda: recovery.is_broken)
                faults.strike("forward")
                factor = float(loop.scale_loss(torch.ones(())))
                loss = loop.scale_loss((model(x) - x.flip(1)).square().mean())
                loss.backward()
                generation = recovery.generations.member.generation.number
                numbers = ids.tolist() if micro_batch.weight else []
                note(batch=begun + 1, ids=numbers, factor=factor, epoch=epoch)
                if loop.sync_gradients:
                    rate = sgd.param_groups[0]["lr"]
                    far = recovery.generations.member.progress()
                    taken = {"lr": rate, "generation": generation, "progress": far}
                    note(taken=begun + 1, ranks=ranks(), **taken)
                    optimizer.step()
                    if not fabric:  # whose strategy does it
                        updates.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    faults.strike("after the step")
                    loop.step_done()
        updates.finish()
    note(end=loop.steps, hash=digest(module), metrics=loop.metrics())
    faulthandler.cancel_dump_traceback_later()
    torch.save(module.state_dict(), folder / f"weights-{own}.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]))
