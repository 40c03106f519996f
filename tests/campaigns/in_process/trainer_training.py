"""A training under a Lightning Trainer, see `worker.py`.

    trainer_training.py FOLDER

Ranks wait for each other in the exchange of gradients only: elsewhere all would restart.
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from recovering_loops import Net
from torch import Tensor

from lightning_dist import CompressedDDPStrategy, ElasticRestart
from lightning_dist.frameworks.lightning.elastic.recovery import RecoverableTrainerLoop
from tests.campaigns.in_process.drawing import SAVES
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


class Module(pl.LightningModule):
    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.net, self._worker, self.met = Net(), worker, worker.strikes.met
        self._begun: tuple[int, int] = (-1, -1)  # generation and step
        self._ids: list[int] = []
        self._world_size = 0
        self.net.layers[1].weight.register_hook(lambda _: self.met("between buckets"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, x = batch
        generations, step = self.trainer.strategy.generations, self.trainer.global_step
        if (generations.member.generation.number, step) != self._begun:
            self._begun, self._ids = (generations.member.generation.number, step), []
            self._world_size = self.trainer.world_size
            self._worker.begin(step, generations, world_size=self._world_size)
        self.met("forward")
        loss = loss_of(self.net, x)
        self.log("loss", loss, on_epoch=True)
        elastic = self.trainer.checkpoint_callbacks[-1]
        assert isinstance(elastic, ElasticRestart)
        assert elastic.micro_batch is not None
        if elastic.micro_batch.weight:
            self._ids += numbers.tolist()
        if elastic.micro_batch.ends_step:
            generation, _ = self._begun
            self._worker.note(computed=step + 1, ids=self._ids, generation=generation)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.met("after the vote")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        generation, step = self._begun
        self._worker.committed(
            step + 1, generation=generation, world_size=self._world_size, net=self.net
        )
        self.met("after the step")

    def on_train_epoch_end(self) -> None:
        if self.trainer.current_epoch < self._worker.plan["epochs"] - 1:
            self.met("end of an epoch")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=RATE, momentum=MOMENTUM)


def train(folder: Path) -> None:
    worker = Worker(folder, RecoverableTrainerLoop)
    module = Module(worker)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=CompressedDDPStrategy(
            worker.plan["codec"], recovery="in_process", bucket_cap_mb=BUCKET_CAP_MB, **COMPRESSION
        ),
        callbacks=[ElasticRestart(folder / "ckpt", every_n_train_steps=SAVES, seed=SEED)],
        max_epochs=worker.plan["epochs"],
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader_of_samples(shuffle=True))
    worker.end(trainer.global_step, module.net)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
