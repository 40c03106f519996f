"""``Trainer(strategy="compressed_ddp")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_dist.integrations.arguments import (
    CHECKPOINT_KEY,
    CONFIG_KEY,
    CompressionArguments,
)
from lightning_dist.integrations.comm_report import comm_metrics
from lightning_dist.integrations.lightning.before_setup import BeforeSetup
from lightning_dist.integrations.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.integrations.lightning.fit_results import FitResults, ResultsLauncher
from lightning_dist.integrations.lightning.launcher import FollowsLauncher, init_process_group
from lightning_dist.integrations.refusals import refuse_pytorch_lightning
from lightning_dist.integrations.strategy_names import register
from lightning_dist.integrations.torch.checks import require_begun, require_compressible
from lightning_dist.integrations.torch.ddp import attach, connect_optimizers
from lightning_dist.private import loss_scale_of

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from lightning_dist.reducer.reducer import Reducer
    from lightning_dist.topology import Topology


class CompressedDDPStrategy(CompressionArguments, FollowsLauncher, DDPStrategy):
    """DDP whose gradients travel compressed. Works on every device and backend DDP works on.

    Arguments: see :class:`~lightning_dist.integrations.arguments.CompressionArguments`, and
    everything ``DDPStrategy`` takes.

    Residuals of all ranks are in the checkpoint under ``"lightning_dist"``. Such a checkpoint loads
    under plain ``ddp`` and a plain one loads here.
    """

    _reducer: Reducer | None = None
    _fit_results: FitResults | None = None  # of the last fit in processes that have ended
    _logged_step = 0
    _max_steps = -1

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = ResultsLauncher(self, start_method=self._start_method)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        refuse_pytorch_lightning(model=model)
        super().connect(model)

    @override
    def setup_distributed(self) -> None:
        init_process_group(self)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is None:  # used without a Trainer, which alone has callbacks
            return
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BeforeSetup):
                callback.before_setup(trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            refuse_pytorch_lightning(callback=callback)
        self._max_steps = trainer.max_steps
        super().setup(trainer)
        if self._reducer is not None and self.optimizers:
            clips = bool(trainer.gradient_clip_val)
            connect_optimizers(self.optimizers, self._reducer, clips=clips)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        require_compressible(self.model)
        super().configure_ddp()
        model: DistributedDataParallel = self.model  # type: ignore[assignment]
        self._logged_step = 0
        self._reducer = attach(
            model,
            self._settings,
            grad_scale=loss_scale_of(getattr(self.precision_plugin, "scaler", None)),
            continue_from=self._reducer,
            timeout=self._timeout,
        )

    @property
    def topology(self) -> Topology | None:
        """Hosts and groups of the ranks; None before the first fit."""
        if self._reducer is not None:
            return self._reducer.network.topology
        return None if self._fit_results is None else self._fit_results.topology

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent since the start of the fit.

        ``raw_bytes`` (what plain DDP would have sent), ``wire_bytes``, ``ratio``, ``intra_bytes``,
        ``inter_bytes`` and ``steps`` in total, the same for ``last_step`` and ``per_codec``. Empty
        before the first fit. After a fit by spawn, fork or in a notebook those of rank 0.
        """
        if self._reducer is not None:
            return self._reducer.comm_stats()
        return {} if self._fit_results is None else self._fit_results.comm_stats

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, hosts and versions; empty before the first fit.

        A ``WandbLogger`` gets it by itself, as ``lightning_dist`` in the configuration of the run.
        """
        if self._reducer is not None:
            return self._reducer.comm_config()
        return {} if self._fit_results is None else self._fit_results.comm_config

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
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

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._log_comm(trainer)

    @override
    def on_train_end(self) -> None:
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
        metrics = self._comm_metrics(stats)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)

    def _comm_metrics(self, stats: Mapping[str, Any]) -> dict[str, float]:
        return comm_metrics([stats])

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        # Called on all ranks. Weights-only checkpoints have no optimizer states.
        if self._reducer is not None and "optimizer_states" in checkpoint:
            self._add_state(checkpoint, self._reducer)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _add_state(self, checkpoint: dict[str, Any], reducer: Reducer) -> None:
        """Add what an exact restart needs, on rank 0. Collective."""
        state = self._state_for(self.checkpoint_io, reducer)
        if state is not None:
            checkpoint[CHECKPOINT_KEY] = state

    def _state_for(self, io: CheckpointIO, reducer: Reducer) -> dict[str, Any] | None:
        if not isinstance(io, CheckpointerIO) or not io.sharded:
            return reducer.state_dict()
        from lightning_dist.checkpoint.plan import Striped

        state, stripes = reducer.striped_state_dict()
        io.striped += [Striped(each.whole, each.own) for each in stripes]
        return state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # The first moment of a restore at which DDP, and so the reducer, is there.
        super().load_optimizer_state_dict(checkpoint)
        if self._reducer is not None:
            self._reducer.load_state_dict(checkpoint.get(CHECKPOINT_KEY))

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if exception.args and isinstance(exception.args[0], str):
            ours = exception.args[0].replace("'ddp_find_unused", "'compressed_ddp_find_unused")
            ours = ours.replace("=DDPStrategy(", f"={type(self).__name__}(")
            exception.args = (ours, *exception.args[1:])

    @override
    def teardown(self) -> None:
        try:
            if self._reducer is not None:
                self._reducer.close()  # raises where the device has failed
        finally:
            super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register(strategy_registry, cls)
