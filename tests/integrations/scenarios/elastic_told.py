"""A training whose launcher is told to end, by rank 0 at step 6; its loader has workers: FOLDER."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

faulthandler.dump_traceback_later(80, exit=True)

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lightning_dist import ElasticRestart  # noqa: E402


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.global_step == 6 and self.global_rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy="compressed_ddp",
        accelerator="cpu",
        max_epochs=-1,
        max_steps=100_000,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ElasticRestart(sys.argv[1], every_n_train_steps=100_000)],
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(4000, 4)), 4, num_workers=1))
