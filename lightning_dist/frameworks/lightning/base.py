"""``SyncStrategy``: base of the strategies for the Trainer, whose hooks it forwards to a Sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.frameworks.lightning.launcher import follow, sampler_arguments
from lightning_dist.frameworks.registration import described
from lightning_dist.ranks import Topology
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.local_updates import Replicas
from lightning_dist.sync.arguments import (
    CONFIG_KEY,
    Reports,
    comm_metrics,
    refuse_pytorch_lightning,
)
from lightning_dist.sync.base import Environment, Sync


class BeforeSetup:
    """A callback that our strategies call when ranks are known and loggers have not begun."""

    reshards_data = False
    """Whether it reshards data when the number of ranks changes."""

    def before_setup(self, trainer: pl.Trainer) -> None:
        """Called on every rank."""


class SyncStrategy(ParallelStrategy):
    """Mixin before a strategy of the Trainer: a :class:`.Sync` keeps replicas of its module equal.

    What is sent, and what of it a checkpoint needs, is the Sync's; see :meth:`kind_of_sync`.
    """

    sync: Sync | None = None
    """What keeps replicas of the module equal; None before the first fit."""
    ended: Reports | None = None
    """Report of a fit in processes that have ended."""
    _replicas: Replicas = "rank"
    _evaluates_shared_weights = True

    def __init__(self, settings: ExchangeSettings, **kwargs: Any) -> None:
        self._settings = settings
        self._evaluation = ExitStack()
        self._max_steps, self._logged_step = -1, 0
        self._of_earlier_fits: Mapping[str, float] = {}
        self._of_all_fits: Mapping[str, float] = {}  # totals of comm_metrics, from fit to fit
        super().__init__(**kwargs)

    def __repr__(self) -> str:
        return described(self, user="Trainer")

    def kind_of_sync(self) -> type[Sync]:
        """Class of the Sync that modules get."""
        raise NotImplementedError

    def _environment(self, **facts: Any) -> Environment:
        module = self.lightning_module
        assert module is not None
        return Environment(
            grad_scaler=getattr(self.precision_plugin, "scaler", None),
            before=self.sync,
            wraps=True,
            clips=bool(module.trainer.gradient_clip_val),
            steps_itself=not module.automatic_optimization,
            replicas=self._replicas,
            **facts,
        )

    def _attach(self, model: nn.Module, environment: Environment) -> None:
        self.sync = self.kind_of_sync().attach(model, self._settings, environment)
        self._logged_step = 0

    @property
    def _active(self) -> Sync | None:
        """The sync of a fit that is under way."""
        return None if self.sync is None or self.sync.closed else self.sync

    @property
    def _report(self) -> Reports | None:
        return self.ended if self.sync is None else self.sync

    @property
    def reducers(self) -> list[Reducer]:
        """Reducer of the module; empty before the first fit."""
        reducer = None if self.sync is None else self.sync.reducer
        return [] if reducer is None else [reducer]

    @property
    def topology(self) -> Topology | None:
        """Nodes and groups of the ranks; None before the first fit."""
        return None if self._report is None else self._report.topology

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent since the start of the fit.

        ``raw_bytes`` (what plain DDP would have sent), ``wire_bytes``, ``ratio``, ``intra_bytes``,
        ``inter_bytes`` and ``steps`` in total, the same for ``last_step`` and ``per_codec``. Empty
        before the first fit. After a fit by spawn, fork or in a notebook those of rank 0.
        """
        return {} if self._report is None else self._report.comm_stats()

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, nodes and versions; empty before the first fit.

        A ``WandbLogger`` gets it by itself, as ``lightning_dist`` in the configuration of the run.
        """
        return {} if self._report is None else self._report.comm_config()

    # Set-up.

    @override
    def _configure_launcher(self) -> None:
        follow(self)
        super()._configure_launcher()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampler_arguments(self.cluster_environment) or super().distributed_sampler_kwargs

    @override
    def connect(self, model: pl.LightningModule) -> None:
        refuse_pytorch_lightning(model=model)
        super().connect(model)

    def _before_setup(self) -> None:
        if self.lightning_module is not None:  # there is a Trainer, which alone has callbacks
            for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, BeforeSetup):
                    callback.before_setup(self.lightning_module.trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            refuse_pytorch_lightning(callback=callback)
        self._max_steps = trainer.max_steps
        if self.sync is not None and not self.sync.continues:
            self.ended, self.sync = self.sync, None
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._attach_with_optimizers()
            if self._active is not None:
                self._active.connect(self.optimizers, self._environment())

    def _attach_with_optimizers(self) -> None:
        """Attach to a module that needs no wrapper, once optimizers are there."""

    # Training.

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        self._of_earlier_fits = self._of_all_fits
        if self._active is not None:
            self._expect_steps(self._active, self.lightning_module.trainer)
        for logger in self.lightning_module.trainer.loggers:
            # Others keep hyperparameters that cannot change later, as they do after a restart.
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams({CONFIG_KEY: self.comm_config()})

    def _expect_steps(self, sync: Sync, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        is_trial = bool(trainer.fast_dev_run) or trainer.max_steps != self._max_steps  # type: ignore[attr-defined]
        steps = None
        if not is_trial and self.lightning_module.automatic_optimization:
            try:
                estimated = trainer.estimated_stepping_batches
            except MisconfigurationException:  # accumulate_grad_batches differs between epochs
                estimated = -1
            steps = int(estimated) if 0 < estimated < float("inf") else None
        sync.expect_steps(steps, done=trainer.global_step, is_trial=is_trial)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if (sync := self._active) is not None:
            sync.begin_step()
            if sync.counts_samples:
                sync.count_samples(extract_batch_size(batch))
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._log_comm(trainer)

    def count_samples(self, samples: float) -> None:
        """Count samples, or tokens, of the step to come beside those of batches.

        Raises:
            ValueError: there is no fit, or it does not weigh by samples.
        """
        if self._active is None:
            raise ValueError("Samples are counted in a fit, and there is none; leave the call out")
        self._active.count_samples(samples)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._active is not None:
            self._active.before_backward(closure_loss)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # Attempted steps count, also where a GradScaler skips one; of several optimizers the first.
        if (sync := self._active) is not None and optimizer is self.optimizers[0]:
            sync.step_done()
            if sync.counts_samples:
                sync.count_samples(0.0)  # of a second step for one batch
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._active is not None and self._evaluates_shared_weights:
            self._evaluation.enter_context(self._active.shared_weights())

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._evaluation.close()

    @override
    def on_train_end(self) -> None:
        if self._active is not None:
            self._active.finish()
        super().on_train_end()
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
        others = {} if self.sync is None else self.sync.metrics()
        metrics = {**comm_metrics([stats]), **others, **self._totals(stats)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)

    def _totals(self, stats: Mapping[str, Any]) -> dict[str, float]:
        totals = {key: of for key, of in comm_metrics([stats]).items() if "/total_" in key}
        return {key: of + self._of_earlier_fits.get(key, 0) for key, of in totals.items()}

    @override
    def teardown(self) -> None:
        self._evaluation.close()
        if stats := self.comm_stats():
            self._of_all_fits = self._totals(stats) or self._of_all_fits
        try:
            if self.sync is not None:
                self.sync.close()  # raises where the device has failed
        finally:
            super().teardown()
