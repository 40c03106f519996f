"""Run by ``lightning-dist launch``: FOLDER. At the first start rank 0 kills its launcher.

That start would train for ever; FOLDER/next is a pipe that is written to when its launcher is dead.
The next one takes ten steps. FOLDER/starts has a line for each start: the step at which it begins.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path

faulthandler.dump_traceback_later(190, exit=True)

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lightning_dist import ElasticRestart  # noqa: E402

FOLDER = Path(sys.argv[1])
LAUNCHER = os.getppid()


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self) -> None:
        self.is_first = self.trainer.global_step == 0
        self.last = self.trainer.global_step + 10
        if self.global_rank == 0:
            with (FOLDER / "starts").open("a") as starts:
                starts.write(f"{self.trainer.global_step}\n")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.is_first and self.global_rank == 0 and self.trainer.global_step == 5:
            os.kill(LAUNCHER, signal.SIGKILL)
            (FOLDER / "next").write_text("")
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *args: object) -> None:
        self.trainer.should_stop = not self.is_first and self.trainer.global_step >= self.last

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy="compressed_ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ElasticRestart(FOLDER / "ckpt", every_n_train_steps=1000)],
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2))
    (FOLDER / "ended").touch()
