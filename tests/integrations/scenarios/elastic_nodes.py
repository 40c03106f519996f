"""Run on two nodes by ``lightning-dist launch --nnodes 1:2``: FOLDER.

The first node trains alone until the second has come; the second is lost in the middle; the first
goes on alone, to the end. FOLDER/starts has a line for each start of the first rank.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

faulthandler.dump_traceback_later(100, exit=True)

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import lightning_dist  # noqa: E402, F401  (registers the strategy)

FOLDER = Path(sys.argv[1])
WAS_TWO = FOLDER / "was_two"


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            with (FOLDER / "starts").open("a") as starts:
                starts.write(f"{self.trainer.world_size}\n")
        if self.trainer.world_size == 2:
            WAS_TWO.touch()
        elif not WAS_TWO.exists():
            (FOLDER / "alone").write_text("")  # a pipe: waits for the second node to read

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.trainer.world_size == 2 and index == 2 and "SECOND_NODE" in os.environ:
            os.kill(
                os.getppid(), signal.SIGKILL
            )  # the node's torchrun, which restarts nothing then
            os._exit(9)
        return self.layer(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.trainer.world_size == 1 and WAS_TWO.exists()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy="compressed_ddp",
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2))
    (FOLDER / "ended").touch()
