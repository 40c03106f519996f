"""Lightning with compressed gradients under Ray Train's controller, on this machine's CPUs.

    pip install "ray[train]"
    python examples/ray_train.py [--dies]

Ray starts the workers, and all of them again when one is lost; training goes on at the newest whole
checkpoint. ``--dies``: one worker ends in the middle of the first start, to see that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import ray.train
import ray.train.torch
import torch
from ray.train.lightning import RayLightningEnvironment
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import CompressedDDPStrategy, ElasticRestart


class RayCompressedDDPStrategy(CompressedDDPStrategy):
    """``RayDDPStrategy`` with our gradients: Ray says which device and which share of the data."""

    @property
    def root_device(self) -> torch.device:
        device: torch.device = ray.train.torch.get_device()
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=False)
        return loss

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class DiesOnce(L.Callback):
    """The last rank ends without a word at step 20 of the first start."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        last = trainer.global_rank == trainer.world_size - 1
        if last and trainer.global_step == 20 and not self.mark.exists():
            self.mark.touch()
            os._exit(1)


def train(config: dict[str, Any]) -> None:
    """What every worker runs, at every start."""
    folder = Path(config["folder"])
    checkpoints = ElasticRestart(folder, every_n_train_steps=8)
    trainer = L.Trainer(
        strategy=RayCompressedDDPStrategy("int8"),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        max_epochs=4,
        callbacks=[checkpoints, *([DiesOnce(folder / "died")] if config["dies"] else [])],
        logger=False,
        enable_progress_bar=False,
    )
    module = Regression()
    started_at: list[int] = []
    module.on_train_start = lambda: started_at.append(trainer.global_step)
    trainer.fit(module)
    if trainer.is_global_zero:
        loss, sent = trainer.callback_metrics["loss"], trainer.strategy.comm_stats()["ratio"]
        print(
            f"{trainer.world_size} ranks, steps {started_at[0]} to {trainer.global_step}, loss "
            f"{loss:.4f}, {sent:.1f} times fewer bytes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dies", action="store_true")
    dies = parser.parse_args().dies
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:  # on a cluster: a folder that all nodes have
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"folder": folder, "dies": dies},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(
                storage_path=f"{folder}/ray",
                failure_config=ray.train.FailureConfig(max_failures=3),
            ),
        )
        trainer.fit()


if __name__ == "__main__":
    main()
