"""One task of a SLURM job: trains, and then trains again until rank 1 dies in the middle."""

import faulthandler
import os
import sys
import time
from typing import Any

faulthandler.dump_traceback_later(120, exit=True)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import lightning_dist  # noqa: E402, F401
from scenarios.fitting import compressed, fit, make_trainer, snapshot  # noqa: E402
from scenarios.models import Regression  # noqa: E402

DIES_AT = 2


class Dying(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == DIES_AT:
            self.died_at = time.monotonic()
            if self.global_rank == 1:
                os._exit(9)
        return super().training_step(batch, batch_idx)


def main(folder: str) -> None:
    os.environ["SCENARIO_FOLDER"] = folder
    torch.set_num_threads(1)
    trainer = make_trainer(compressed(), devices=2, max_epochs=2)
    environment = type(trainer.strategy.cluster_environment).__name__
    trainer.fit(Regression())
    facts = {**snapshot(trainer), "environment": environment}
    torch.save({"facts": facts}, f"{folder}/slurm.{trainer.global_rank}.pt")

    model, error = Dying(), ""
    try:
        fit(model, compressed(), devices=2)
    except Exception as caught:
        error = repr(caught)
    facts = {"error": error, "seconds": time.monotonic() - model.died_at}
    torch.save({"facts": facts}, f"{folder}/survivor.{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
