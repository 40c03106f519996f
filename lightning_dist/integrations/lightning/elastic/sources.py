"""Where the loops of a fit get their dataloaders from: the user's, with workers that stay."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from typing_extensions import override

from lightning_dist.elastic.workers import keep_workers
from lightning_dist.integrations.lightning import private
from lightning_dist.integrations.lightning.elastic.data import ElasticData
from lightning_dist.integrations.lightning.elastic.signals import notice_signals


class KeptSource(private.DataLoaderSource):
    """Loaders whose workers outlive a launcher's signal, as their process does.

    A source is asked whenever loaders are made, and before any of their workers begins: at the
    sanity check, at the first validation after a restart, and when loaders are made anew.

    Args:
        usual: the loop's own, which this stands in for.
    """

    def __init__(self, usual: private.DataLoaderSource, *, trainer: pl.Trainer) -> None:
        super().__init__(usual.instance, usual.name)
        self.usual = usual
        self._trainer = trainer

    @override
    def dataloader(self) -> Any:
        loaders = super().dataloader()
        environment = private.cluster_environment(self._trainer)
        seeded, rank = int(os.environ.get("PL_SEED_WORKERS", 0)), self._trainer.global_rank
        for loader in _each(loaders):
            # seed_everything(workers=True): Lightning would not, where there is something already.
            if seeded and getattr(loader, "worker_init_fn", loader) is None:
                loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
            keep_workers(loader, notice_signals(environment))
        return loaders


class ElasticSource(KeptSource):
    """The train dataloader, dealt."""

    def __init__(
        self, usual: private.DataLoaderSource, *, trainer: pl.Trainer, data: ElasticData
    ) -> None:
        super().__init__(usual, trainer=trainer)
        self._data = data

    @override
    def dataloader(self) -> Any:
        return self._data.deal(super().dataloader())


def place_sources(trainer: pl.Trainer, data: ElasticData) -> None:
    """Stand in for the sources of a fit; the train dataloader is dealt by ``data``."""
    fit: Any = trainer.fit_loop
    validation = fit.epoch_loop.val_loop
    train = ElasticSource(private.data_source(fit), trainer=trainer, data=data)
    private.set_data_source(fit, train)
    kept = KeptSource(private.data_source(validation), trainer=trainer)
    private.set_data_source(validation, kept)


def restore_sources(trainer: pl.Trainer) -> None:
    """Give the loops back what :func:`place_sources` has stood in for."""
    loops: tuple[Any, ...] = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in loops:
        source = private.data_source(loop)
        if isinstance(source, KeptSource):
            source.usual.instance = source.instance
            private.set_data_source(loop, source.usual)


def _each(loaders: Any) -> list[Any]:
    """All of what a user may give a loop: one, a collection, or Lightning's own of several."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return list(combined.flattened)
