"""Run by torchrun: a short training in which one rank dies at the first start of the job.

elastic_job.py FOLDER FRAMEWORK OPTIONS: the options are JSON, arguments of Trainer or Fabric, and
``"dies"``, a rank (none: -1). FOLDER/R.json is what rank R of the last start has to tell.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

faulthandler.dump_traceback_later(90, exit=True)

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import lightning_dist  # noqa: E402

FOLDER = Path(sys.argv[1])
SAMPLES = 24


class Numbers(Dataset[torch.Tensor]):
    """Sample ``i`` is ``i``."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Module(L.LightningModule):
    """Keeps what it saw, and takes its process along in the second batch of the first start."""

    def __init__(self, dies: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dies = dies
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == 1:
            die_once(self.dies)
        self.seen += batch[:, 0].int().tolist()
        return self.layer(batch / SAMPLES).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def die_once(rank: int) -> None:
    """End this process without a word, if it is that rank and nobody died yet."""
    mark = FOLDER / "died"
    if int(os.environ["RANK"]) == rank and not mark.exists():
        mark.touch()
        os._exit(3)


def train(options: dict[str, Any]) -> None:
    module = Module(options.pop("dies", -1))
    if options.pop("plugin", False):
        options["plugins"] = [lightning_dist.ElasticEnvironment()]
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(Numbers(), batch_size=2))
    tell(trainer.strategy, module.seen)


def train_with_fabric(options: dict[str, Any]) -> None:
    dies = options.pop("dies", -1)
    fabric = L.Fabric(accelerator="cpu", **options)
    fabric.launch()
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    seen: list[int] = []
    for index, batch in enumerate(fabric.setup_dataloaders(DataLoader(Numbers(), batch_size=2))):
        if index == 1:
            die_once(dies)
        seen += batch[:, 0].int().tolist()
        fabric.backward(model(batch / SAMPLES).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    tell(fabric.strategy, seen)


def tell(strategy: Any, seen: list[int]) -> None:
    facts = {
        "seen": seen,
        "world_size": strategy.world_size,
        "num_nodes": strategy.num_nodes,
        "devices": len(strategy.parallel_devices),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    (FOLDER / f"{strategy.global_rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = {"lightning": train, "fabric": train_with_fabric}[sys.argv[2]]
    run(json.loads(sys.argv[3]))
