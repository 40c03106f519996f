"""``Trainer(strategy="compressed_ddp")``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_dist.base.private import loss_scale_of
from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.base import CompressingStrategy
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.frameworks.lightning.fit_results import ResultsLauncher
from lightning_dist.frameworks.lightning.launcher import FollowsLauncher, init_process_group
from lightning_dist.frameworks.lightning.recovering import RecoversInProcess
from lightning_dist.frameworks.strategies.arguments import (
    CHECKPOINT_KEY,
    CompressionArguments,
)
from lightning_dist.sync.ddp import attach, connect_optimizers
from lightning_dist.sync.rules import require_compressible, require_one_optimizer

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from lightning_dist.reducer.reducer import Reducer


class CompressedDDPStrategy(
    CompressingStrategy, CompressionArguments, RecoversInProcess, FollowsLauncher, DDPStrategy
):
    """DDP with compressed gradients, on every device and backend that DDP supports.

    Arguments: see :class:`.CompressionArguments`, and everything ``DDPStrategy`` takes.

    Checkpoints hold the residuals of all ranks under ``"lightning_dist"``. They load under plain
    ``ddp``, and checkpoints of ``ddp`` load here.
    """

    _can_recover = True

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = ResultsLauncher(self, start_method=self._start_method)

    @override
    def setup_distributed(self) -> None:
        if self.recovery == "in_process" and self._fits:
            self._begin_recovery()
        init_process_group(self)
        super().setup_distributed()

    @property
    def _fits(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == "fit"

    def _begin_recovery(self) -> None:
        from lightning_dist.frameworks.lightning.elastic.restart import ElasticRestart

        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        if trainer.fast_dev_run or not any(
            isinstance(e, ElasticRestart) for e in trainer.callbacks
        ):
            raise ValueError(
                "recovery='in_process' needs ElasticRestart(...) among the callbacks, which "
                "reshards the data over the remaining ranks, and a fit without fast_dev_run"
            )
        environment = RecoveryEnvironment.from_env()
        if environment is not None:
            self.begin_recovery(environment)
            return
        rank_zero.warn(
            "recovery='in_process' takes effect under `lightning-dist launch` only; here all ranks "
            "restart if one is lost"
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._before_setup()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        require_one_optimizer(self._settings, len(self.optimizers))
        if self._reducer is not None and self.optimizers:
            clips = bool(trainer.gradient_clip_val)
            connect_optimizers(self.optimizers, self._reducer, clips=clips)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        require_compressible(self.model, self._settings)
        super().configure_ddp()
        model: DistributedDataParallel = self.model
        self._logged_step = 0
        growing = self.generations.groups.growing if self.generations else nullcontext
        with growing():
            self._reducer = attach(
                model,
                self._settings,
                grad_scale=loss_scale_of(getattr(self.precision_plugin, "scaler", None)),
                continue_from=self._reducer,
                groups=self._groups,
            )

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
            return self.meet(lambda: reducer.state_dict(to=self._leader))
        return io.spread_state_of(reducer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # The first moment of a restore at which DDP, and so the reducer, is there.
        super().load_optimizer_state_dict(checkpoint)
        if self._reducer is not None and not self.joins:  # a newcomer has what regrouping gave it
            self._reducer.load_state_dict(checkpoint.get(CHECKPOINT_KEY))

    @override
    def on_train_end(self) -> None:
        if self._reducer is not None:
            self._reducer.wait()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if exception.args and isinstance(exception.args[0], str):
            ours = exception.args[0].replace("'ddp_find_unused", "'compressed_ddp_find_unused")
            ours = ours.replace("=DDPStrategy(", f"={type(self).__name__}(")
            exception.args = (ours, *exception.args[1:])
