"""One trainer and one strategy used several times."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import lightning as L
from torch.nn.parallel import DistributedDataParallel

from scenarios.catalogue import Facts, scenario
from scenarios.fitting import compressed, fit, make_trainer, residuals, snapshot
from scenarios.models import Regression


class AtStart(L.Callback):
    """Residuals and step count when a fit starts."""

    def __init__(self) -> None:
        self.residuals: dict[str, Any] = {}
        self.step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.residuals = residuals(trainer.strategy)
        self.step = trainer.strategy._reducer.step


@scenario
def several_fits() -> Facts:
    start, model = AtStart(), Regression()
    trainer = make_trainer(compressed(bucket_cap_mb=0.001), max_epochs=1, callbacks=[start])
    trainer.fit(model)
    first = copy.deepcopy(snapshot(trainer))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    return {
        "first": first,
        "second": snapshot(trainer),
        "start of second": start.residuals,
        "step at start of second": start.step,
        "one fit": fit(Regression(), compressed(bucket_cap_mb=0.001), max_epochs=2),
    }


@scenario
def many_fits() -> Facts:
    """Threads and open files of this process after each of five fits."""
    trainer, held = make_trainer(compressed(), max_epochs=0), []
    for fits in range(1, 6):
        trainer.fit_loop.max_epochs = fits
        trainer.fit(Regression(batches=1))
        held.append([len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))])
    return {"threads and files": held}


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@scenario
def advice() -> Facts:
    """A tiny model on the loopback interface: compression cannot pay."""
    listener = Listener()
    logging.getLogger("lightning_dist").addHandler(listener)
    try:
        facts = fit(Regression(), compressed(), max_epochs=10)
    finally:
        logging.getLogger("lightning_dist").removeHandler(listener)
    return facts | {"messages": listener.messages}


@scenario
def evaluation_around_fit() -> Facts:
    """Evaluation needs no hook, and leaves what the next fit goes on from."""
    model = Regression()
    trainer = make_trainer(compressed(), max_epochs=1, limit_val_batches=1.0)
    facts: Facts = {"stats before": dict(trainer.strategy.comm_stats())}
    facts["val before"] = trainer.validate(model, verbose=False)[0]["val_loss"]
    facts["test before"] = trainer.test(model, verbose=False)[0]["test_loss"]
    facts["stats after validate"] = dict(trainer.strategy.comm_stats())
    trainer.fit(model)
    facts["wrapped after fit"] = isinstance(trainer.strategy.model, DistributedDataParallel)
    facts["val after"] = trainer.validate(model, verbose=False)[0]["val_loss"]
    facts["test after"] = trainer.test(model, verbose=False)[0]["test_loss"]
    facts["predictions"] = len(trainer.predict(model))
    facts["fit"] = copy.deepcopy(snapshot(trainer))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    facts["second fit"] = snapshot(trainer)
    return facts
