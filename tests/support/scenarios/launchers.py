"""Run with plain python, FOLDER STRATEGY...: Lightning starts the second rank itself, as a second
run of this script where the strategy does not say by fork or spawn. FOLDER/STRATEGY.R.pt is what
rank R of each has to tell.
"""

import faulthandler
import os
import sys

faulthandler.dump_traceback_later(240, exit=True)

import lightning as L  # noqa: E402
import torch  # noqa: E402

import lightning_dist  # noqa: E402, F401  (registers the names)
from scenarios.fitting import make_trainer, snapshot  # noqa: E402
from scenarios.models import Regression  # noqa: E402

HIDDEN = 256  # weights of 4096 elements: compressed by default


class Report(L.Callback):
    """Writes from where the training runs: the main process sees little of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        facts = {**snapshot(trainer), "pid": os.getpid()}
        path = f"{os.environ['SCENARIO_FOLDER']}/{self.name}.{trainer.global_rank}.pt"
        torch.save({"facts": facts}, path)


def train(strategy: str) -> L.Trainer:
    trainer = make_trainer(strategy, devices=2, max_epochs=2, callbacks=[Report(strategy)])
    trainer.fit(Regression(HIDDEN))
    return trainer


def train_in_workers(strategy: str) -> None:
    """And remember what the process that called `fit` knows of it when the workers are gone."""
    ours = train(strategy).strategy
    facts = {
        "stats": dict(ours.comm_stats()),
        "config": ours.comm_config(),
        "topology": str(ours.topology),
    }
    torch.save({"facts": facts}, f"{os.environ['SCENARIO_FOLDER']}/main_{strategy}.0.pt")


if __name__ == "__main__":
    os.environ["SCENARIO_FOLDER"] = sys.argv[1]
    torch.set_num_threads(1)
    *in_workers, as_scripts = sys.argv[2:]
    if "LOCAL_RANK" not in os.environ:  # the script as the user starts it, not its second run
        for strategy in in_workers:
            train_in_workers(strategy)
    train(as_scripts)
