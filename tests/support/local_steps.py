"""Trainings of one small model in local steps: by a Trainer and by an ElasticLoop."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from scenarios.fitting import QUIET, digest, parameters
from scenarios.models import Regression
from scenarios.world import TIMEOUT
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_dist import ElasticLoop, ElasticRestart, LocalUpdateStrategy, local_updates

KEY = "lightning_dist_local_updates"
SCHEDULE: dict[str, Any] = {"method": "diloco", "sync_every": 3, "overlap_steps": 1, "mixing": 0.25}
COMPRESSED: dict[str, Any] = {**SCHEDULE, "min_compress_numel": 0}


class Watched(L.Callback):
    """Digests of the weights in validations, after each batch and at the end; samples."""

    def __init__(self) -> None:
        self.validated: list[str] = []
        self.own: list[str] = []
        self.samples: list[float] = []

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, *_: Any
    ) -> None:
        self.validated.append(digest(module))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.own.append(digest(module))
        self.samples += batch[0][:, 0].tolist()


class SameData(Regression):
    """The same number of samples on any number of ranks."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(super().train_dataloader().dataset, range(64)), batch_size=8)


def dealt(model: L.LightningModule) -> Iterator[Any]:
    """Batches of this rank in two epochs of a Trainer."""
    loader = model.train_dataloader()
    sampler = DistributedSampler(loader.dataset)  # as Lightning makes it
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler)


def nothing(samples: int) -> None:
    pass


def trained(
    model: Regression,
    optimizer: Any,
    updates: Any,
    *,
    net: Any = None,
    batches: Iterable[Any] | None = None,
    before: Callable[[int], object] = nothing,
    after: Callable[[int], object] = nothing,
) -> list[str]:
    """Digests of the weights after each step of one's own loop, and at its end.

    Args:
        net: DDP or Fabric around the model.
        batches: those of a Trainer if None.
        before: called before every step of the optimizer with the number of samples.
        after: the same, after it.
    """
    batches, own = list(batches or dealt(model)), list[str]()
    updates.total_steps = len(batches)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss((net or model.net)(x), y).backward()
        before(len(x))
        optimizer.step()
        after(len(x))
        own.append(digest(model))
    updates.close()
    return [*own, digest(model)]


def strategy(**settings: Any) -> LocalUpdateStrategy:
    return LocalUpdateStrategy(**{"timeout": TIMEOUT, **COMPRESSED, **settings})


def fit(
    of: Any, *callbacks: L.Callback, model: Any = None, ckpt_path: Any = None, **arguments: Any
) -> tuple[L.Trainer, Watched]:
    watched = Watched()
    given = {**QUIET, "devices": dist.get_world_size(), "max_epochs": 2, **arguments}
    trainer = L.Trainer(strategy=of, callbacks=[*callbacks, watched], **given)
    trainer.fit(model or SameData(), ckpt_path=ckpt_path)
    watched.own.append(digest(trainer.lightning_module))
    return trainer, watched


class Interrupted(L.Callback):
    """Ends a fit by an error after so many steps, and saves a checkpoint if it has a path."""

    def __init__(self, steps: int, path: Path | None = None) -> None:
        self._steps, self._path = steps, path

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._steps:
            if self._path is not None:
                trainer.save_checkpoint(self._path)
            raise InterruptedError


def elastic(folder: Path, *callbacks: L.Callback) -> tuple[L.Trainer, Watched]:
    """Steps of two epochs; a checkpoint after 5 of them, in the middle of a window."""
    restart = ElasticRestart(folder, every_n_train_steps=5, hang_timeout=None)
    given = {"enable_checkpointing": True, "default_root_dir": folder}
    return fit(strategy(codec="int4"), restart, *callbacks, **given)


def looped(folder: Path, *, stop: int = 0) -> tuple[dict[str, Tensor], list[str]]:
    """Two epochs of an ElasticLoop that saves after 3 steps, where an exchange has just begun.

    Args:
        stop: an error ends it after so many steps.

    Returns:
        Weights at the start, and digests of the weights after each batch and at the end.
    """
    model = SameData()
    optimizer = model.configure_optimizers()
    updates = local_updates(model, optimizer, codec="int4", **COMPRESSED)
    state = {"updates": updates, "model": model, "optimizer": optimizer}
    settings: dict[str, Any] = {"every_n_train_steps": 3, "every_n_epochs": 0, "seed": 5}
    loader, own = model.train_dataloader(), list[str]()
    with (
        suppress(InterruptedError),
        ElasticLoop(folder, loader=loader, state=state, hang_timeout=None, **settings) as loop,
    ):
        start = parameters(model)
        for _ in loop.epochs(2):
            for batch in loop.batches():
                loop.scale_loss(model.loss(batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
                updates.step()
                own.append(digest(model))
                loop.step_done()
                if loop.steps == stop:
                    raise InterruptedError
    assert loop.steps == (stop or 8)
    updates.finish()
    updates.close()
    return start, [*own, digest(model)]
