"""Run by ``lightning-dist launch``: FOLDER STOPS SIGNAL WORKERS, the last one of the loader.

The first node waits, alone, for a second one, whose launcher gets the signal in the middle. After
STOPS such nodes the first one goes on alone, to the end. FOLDER/starts has a line for each start of
the first rank.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path

faulthandler.dump_traceback_later(220, exit=True)

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lightning_dist import ElasticRestart  # noqa: E402

FOLDER, STOPS = Path(sys.argv[1]), int(sys.argv[2])
SIGNAL, WORKERS = signal.Signals[sys.argv[3]], int(sys.argv[4])


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            with (FOLDER / "starts").open("a") as starts:
                starts.write(f"{self.trainer.world_size}\n")
        self.stops = len(list(FOLDER.glob("stop-*")))
        if self.trainer.world_size == 1 and self.stops < STOPS:
            # A pipe: waits for the next second node to read.
            (FOLDER / f"alone-{self.stops}").write_text("")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        is_told = self.local_rank == 0 and "SECOND_NODE" in os.environ
        if self.trainer.world_size == 2 and index >= 2 and is_told:
            stop = FOLDER / f"stop-{self.stops}"
            if not stop.exists():
                stop.touch()
                os.kill(os.getppid(), SIGNAL)
                if SIGNAL == signal.SIGKILL:
                    os._exit(9)
        return self.layer(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.trainer.world_size == 1 and self.stops == STOPS

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy="compressed_ddp",
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ElasticRestart(FOLDER / "ckpt", every_n_train_steps=1000)],
    )
    samples = TensorDataset(torch.ones(64, 4))
    trainer.fit(Module(), DataLoader(samples, batch_size=2, num_workers=WORKERS))
    (FOLDER / "ended").touch()
