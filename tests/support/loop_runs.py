"""The training of `elastic_runs`, in loops of the user's own: plain DDP, Accelerate, Fabric."""

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from elastic_runs import SIZE, Fault, Numbered, hash_of, make_loader, note_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import ElasticLoop, compress_ddp, init_process_group

WIDTH = 4
Strike = Callable[[str, int], None]
"""What may happen at a place and step of the loop."""


def net(*, noisy: bool = True) -> nn.Module:
    torch.manual_seed(1)
    drop = nn.Dropout(0.2 if noisy else 0.0)
    return nn.Sequential(nn.Linear(WIDTH, 8), drop, nn.Tanh(), nn.Linear(8, WIDTH))


def _plain(model: nn.Module, optimizer: Any, codec: str | None) -> Any:
    if "RANK" not in os.environ:
        return model, optimizer, lambda loss: loss.backward()
    init_process_group("gloo")
    # DDP puts its buckets in another order after the first step of a process, and sums of three
    # ranks or more are then other ones in their last bits, unless it looks for unused parameters.
    model = DistributedDataParallel(model, find_unused_parameters=dist.get_world_size() > 2)
    _compress(model, codec)
    return model, optimizer, lambda loss: loss.backward()


def _accelerate(model: nn.Module, optimizer: Any, codec: str | None) -> Any:
    from accelerate import Accelerator

    os.environ["ACCELERATE_USE_CPU"] = "true"
    if "RANK" in os.environ:
        init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    _compress(model, codec)
    return model, optimizer, accelerator.backward


def _fabric(model: nn.Module, optimizer: Any, codec: str | None) -> Any:
    from lightning.fabric import Fabric

    from lightning_dist.fabric import CompressedDDPStrategy

    strategy = CompressedDDPStrategy(codec or "none", min_compress_numel=0)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    return model, optimizer, fabric.backward


def _compress(model: nn.Module, codec: str | None) -> None:
    if codec is not None and isinstance(model, DistributedDataParallel):
        compress_ddp(model, codec, min_compress_numel=0, compile_kernels=False)


FRAMEWORKS = {"plain": _plain, "accelerate": _accelerate, "fabric": _fabric}


def train(
    folder: Path,
    framework: str,
    *,
    codec: str | None = "int8",
    strike: Strike = lambda place, step: None,
    noisy: bool = True,
    epochs: int = 3,
    size: int = SIZE,
    loader: Mapping[str, Any] | None = None,
    data: str = "",
    elastic: Mapping[str, Any] | None = None,
    saving: Mapping[str, Any] | None = None,
    watch: Callable[[ElasticLoop], None] = lambda loop: None,
) -> tuple[str, int]:
    """Hash of the weights and number of steps at the end.

    Args:
        data: a name of :data:`elastic_data.LOADERS`; or else `make_loader` makes the loader.
        saving: arguments of CheckpointSettings.
        watch: called after every step.
    """
    module = net(noisy=noisy)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
    model, optimizer, backward = FRAMEWORKS[framework](module, optimizer, codec)
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    ids: list[int] = []
    settings = {"every_n_train_steps": 2, "seed": 5, **(elastic or {})}
    settings |= saving or {}
    with ElasticLoop(
        folder / "ckpt",
        loader=_loader(data) if data else numbered(size, noisy=noisy, **(loader or {})),
        state={"model": model, "optimizer": optimizer, "scheduler": scheduler},
        **settings,
    ) as loop:
        for epoch in loop.epochs(epochs):
            for numbers, x in loop.batches():
                loss = nn.functional.mse_loss(model(x), x.flip(1))
                strike("in_pass", loop.steps)
                backward(loop.scale_loss(loss))
                strike("after_backward", loop.steps)
                ids += numbers.tolist() if loop.micro_batch.weight else []
                if loop.sync_gradients:
                    optimizer.step()
                    strike("after_optimizer", loop.steps)
                    scheduler.step()
                    optimizer.zero_grad()
                    _note(folder / "account", loop.steps + 1, epoch, ids, module)
                    ids = []
                    loop.step_done()
                    strike("after_step", loop.steps)
                    watch(loop)
            strike("after_epoch", loop.steps)
            torch.rand(())  # a validation that draws
    rank = os.environ.get("RANK", "0")
    (folder / f"metrics-{rank}.json").write_text(json.dumps(loop.metrics()))
    return hash_of(module), loop.steps


def failing(place: str, step: int) -> Strike:
    def strike(at: str, steps: int) -> None:
        if (at, steps) == (place, step):
            raise Fault

    return strike


def numbered(size: int, *, noisy: bool, **arguments: Any) -> Any:
    return make_loader(Numbered(size, noisy=noisy), **arguments)


def _loader(name: str) -> Any:
    from elastic_data import LOADERS

    return LOADERS[name]()


def _note(folder: Path, step: int, epoch: int, ids: list[int], module: nn.Module) -> None:
    rank, world = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    note_step(folder, rank=rank, step=step, epoch=epoch, ids=ids, hash=hash_of(module), world=world)
