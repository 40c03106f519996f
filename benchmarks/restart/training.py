"""One rank of the trainings that `in_process.py` lets ranks of die; steps without an end.

    training.py WAY FOLDER SETTINGS

It writes every step with its time and the number of ranks to ``FOLDER/<process>.steps``. SETTINGS
is JSON: ``codec``, ``parameters``, ``seconds`` of sleep in a micro-batch, and what a way needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 600_000
EVERY = 50
"""Steps between checkpoints of torchrun."""


def with_ours(folder: Path, options: dict[str, Any], note: Callable[[int, int], None]) -> None:
    """An ElasticLoop that recovers within the process, or by a restart."""
    from lightning_dist import ElasticLoop, compress_ddp, init_process_group

    recovers = options["recovery"] == "in_process"
    init_process_group("gloo", **({"recovery": "in_process"} if recovers else {}))
    net, inputs = model_of(options)
    model = DistributedDataParallel(net)
    state_update = options.get("state_update", "auto")
    compiled = options.get("compile_kernels", False)
    compress_ddp(model, options["codec"], state_update=state_update, compile_kernels=compiled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ElasticLoop(
        folder / "ckpt",
        loader=DataLoader(TensorDataset(torch.randn(SAMPLES, 1)), batch_size=2),
        state={"model": model, "optimizer": optimizer},
        every_n_train_steps=None if recovers else options.get("every", EVERY),
        batch_policy=options.get("policy", "fixed_global_batch"),
        gradient_accumulation_steps=options.get("micro_batches", 1),
        recovery=options["recovery"],
    ) as loop:
        for _ in loop.epochs(1):
            for (x,) in loop.batches():
                before = loop.steps
                time.sleep(options["seconds"])
                loop.scale_loss(loss_of(model, inputs, x)).backward()
                if not loop.sync_gradients:
                    continue
                world = torch.distributed.get_world_size()
                optimizer.step()
                optimizer.zero_grad()
                loop.step_done()
                if loop.steps > before:
                    note(loop.steps, world)


def with_trainer(folder: Path, options: dict[str, Any], note: Callable[[int, int], None]) -> None:
    """A Trainer with ElasticRestart; ``sharded``: the model is in FSDP2."""
    import lightning as L

    import lightning_dist

    class Net(L.LightningModule):
        def configure_model(self) -> None:
            if hasattr(self, "net"):
                return
            self.net, self.inputs = model_of(options)
            if options["sharded"]:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            time.sleep(options["seconds"])
            return loss_of(self.net, self.inputs, batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Note(L.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            note(trainer.global_step, trainer.world_size)

    strategy: Any = "compressed_ddp"
    if options["sharded"]:
        strategy = lightning_dist.CompressedModelParallelStrategy(options["codec"])
    saved = "sharded" if options["sharded"] else "single"
    place, every = folder / "ckpt", options["every"]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Note(),
            lightning_dist.ElasticRestart(place, every_n_train_steps=every, format=saved),
        ],
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(SAMPLES, 1)), batch_size=2))


def with_torchrun(folder: Path, options: dict[str, Any], note: Callable[[int, int], None]) -> None:
    """DDP, and a checkpoint of rank 0 every few steps, as in torch's documentation."""
    torch.distributed.init_process_group("gloo")
    net, inputs = model_of(options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    path, step = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(net)
    while True:
        time.sleep(options["seconds"])
        loss_of(model, inputs, torch.randn(2, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note(step, torch.distributed.get_world_size())
        if step % EVERY == 0 and torch.distributed.get_rank() == 0:
            states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "step": step}, folder / "new.pt")
            (folder / "new.pt").rename(path)


def with_torchft(folder: Path, options: dict[str, Any], note: Callable[[int, int], None]) -> None:
    """A replica of one rank, as in torchft's README."""
    import torchft
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported silently

    net, inputs = model_of(options)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{os.getpid()}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=options["lighthouse"],
        hostname="127.0.0.1",
    )
    optimizer = torchft.Optimizer(manager, inner)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        time.sleep(options["seconds"])
        loss_of(net, inputs, torch.randn(2, 1)).backward()
        # Its DistributedDataParallel fails with an assertion in the hook, with torch 2.13.
        for work in [manager.allreduce(each.grad) for each in net.parameters()]:
            work.wait()
        optimizer.step()
        if manager.current_step() > before:
            note(manager.current_step(), manager.num_participants())


def lighthouse(folder: Path, options: dict[str, Any], note: Callable[[int, int], None]) -> None:
    """torchft's coordinator, for as long as this process lives."""
    from torchft.coordination import LighthouseServer

    timeout = {k: options[k] for k in ("heartbeat_timeout_ms",) if k in options}
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100, **timeout
    )
    (folder / "new").write_text(server.address())
    (folder / "new").rename(folder / "lighthouse")
    while True:
        time.sleep(1)


def model_of(options: dict[str, Any]) -> tuple[nn.Module, int]:
    """A model of so many parameters, and the width of what it takes."""
    width = max(8, int((options["parameters"] / 2) ** 0.5))
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)), width


def loss_of(model: nn.Module, inputs: int, x: Tensor) -> Tensor:
    loss: Tensor = model(x.expand(-1, inputs)).square().mean()
    return loss


WAYS = {
    "ours": with_ours,
    "trainer": with_trainer,
    "torchrun": with_torchrun,
    "torchft": with_torchft,
    "lighthouse": lighthouse,
}


def main(way: str, place: str, settings: str) -> None:
    torch.set_num_threads(1)
    folder, options = Path(place), json.loads(settings)
    file = (folder / f"{os.getpid()}.steps").open("w", buffering=1)

    def note(step: int, world: int) -> None:
        print(json.dumps({"step": step, "time": time.time(), "world": world}), file=file)

    WAYS[way](folder, options, note)


if __name__ == "__main__":
    main(*sys.argv[1:])
