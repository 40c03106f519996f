"""Base of the strategies for the Trainer: refusals, reports for users and loggers, teardown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from lightning_dist.frameworks.strategies.arguments import CONFIG_KEY
from lightning_dist.sync.arguments import refuse_pytorch_lightning
from lightning_dist.sync.report import CommReport, Reports, comm_metrics
from lightning_dist.sync.rules import require_begun

if TYPE_CHECKING:
    from lightning_dist.reducer.reducer import Reducer


class BeforeSetup:
    """A callback that our strategies call when ranks are known and loggers have not begun."""

    def before_setup(self, trainer: pl.Trainer) -> None:
        """Called on every rank."""


class CompressingStrategy(CommReport):
    """Mixin before a strategy that has a reducer in a fit."""

    ended: Reports | None = None
    """Report of a fit in processes that have ended."""
    _reducer: Reducer | None = None
    _logged_step = 0
    _max_steps = -1
    _of_earlier_fits: Mapping[str, float] = {}
    _of_all_fits: Mapping[str, float] = {}
    """Totals of :func:`comm_metrics`, which go on from fit to fit."""

    if TYPE_CHECKING:
        lightning_module: pl.LightningModule | None
        optimizers: list[Any]

        def barrier(self, name: str | None = None) -> None: ...

    @property
    def reducers(self) -> list[Reducer]:
        """Of the module; empty before the first fit."""
        return [] if self._reducer is None else [self._reducer]

    @property
    @override
    def _reports(self) -> Sequence[Reports]:
        return super()._reports or ([] if self.ended is None else [self.ended])

    @override
    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent since the start of the fit.

        ``raw_bytes`` (what plain DDP would have sent), ``wire_bytes``, ``ratio``, ``intra_bytes``,
        ``inter_bytes`` and ``steps`` in total, the same for ``last_step`` and ``per_codec``. Empty
        before the first fit. After a fit by spawn, fork or in a notebook those of rank 0.
        """
        return self._reports[0].comm_stats() if self._reports else {}

    def connect(self, model: pl.LightningModule) -> None:
        refuse_pytorch_lightning(model=model)
        super().connect(model)  # type: ignore[misc]

    def _before_setup(self) -> None:
        if self.lightning_module is not None:  # there is a Trainer, which alone has callbacks
            for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, BeforeSetup):
                    callback.before_setup(self.lightning_module.trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            refuse_pytorch_lightning(callback=callback)
        self._max_steps = trainer.max_steps
        super().setup(trainer)  # type: ignore[misc]

    def on_train_start(self) -> None:
        super().on_train_start()  # type: ignore[misc]
        assert self.lightning_module is not None
        self._of_earlier_fits = self._of_all_fits
        if self._reducer is not None:
            self._require_begun(self.lightning_module.trainer)
        for logger in self.lightning_module.trainer.loggers:
            # Others keep hyperparameters that cannot change later, as they do after a restart.
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams({CONFIG_KEY: self.comm_config()})

    def _require_begun(self, trainer: pl.Trainer) -> None:
        """Raise ValueError if this training is over before compression begins.

        Not in trial runs, of a tuner or one's own, nor after a restart: the first start has passed.
        """
        assert self._reducer is not None
        assert self.lightning_module is not None
        is_trial = trainer.fast_dev_run or trainer.max_steps != self._max_steps  # type: ignore[attr-defined]
        alone = self._reducer.network.world_size == 1
        known = self.lightning_module.automatic_optimization
        if is_trial and self._reducer.never_compressed is not None:
            self._reducer.never_compressed.detach()
        if is_trial or alone or trainer.global_step or not known:
            return
        steps = trainer.estimated_stepping_batches
        if steps > 0:  # or nobody knows
            require_begun(self._reducer, self.optimizers, steps=steps)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._log_comm(trainer)

    def on_train_end(self) -> None:
        super().on_train_end()  # type: ignore[misc]
        # A process that exits with messages unread resets its connections, and with them what the
        # other ranks have not read of its last ones.
        self.barrier("end of training")
        assert self.lightning_module is not None
        if self.lightning_module.trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._log_comm(self.lightning_module.trainer)

    def _log_comm(self, trainer: pl.Trainer) -> None:
        stats = self.comm_stats()
        if not stats or stats["steps"] in (0, self._logged_step):
            return
        self._logged_step = stats["steps"]
        metrics = {**self._comm_metrics(stats), **self._totals(stats)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)

    def _totals(self, stats: Mapping[str, Any]) -> dict[str, float]:
        totals = {key: of for key, of in comm_metrics([stats]).items() if "/total_" in key}
        return {key: of + self._of_earlier_fits.get(key, 0) for key, of in totals.items()}

    def _comm_metrics(self, stats: Mapping[str, Any]) -> dict[str, float]:
        return comm_metrics([stats])

    def teardown(self) -> None:
        compressed: Sequence[Any] = super()._reports
        if stats := self.comm_stats():
            self._of_all_fits = self._totals(stats) or self._of_all_fits
        try:
            for each in compressed:
                each.close()  # raises where the device has failed
        finally:
            super().teardown()  # type: ignore[misc]
