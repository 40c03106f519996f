"""``Trainer(strategy="compressed_model_parallel")``."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.integrations.lightning.base import CompressingStrategy
from lightning_dist.integrations.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.integrations.lightning.launcher import FollowsLauncher
from lightning_dist.integrations.lightning.private import give_device_mesh
from lightning_dist.integrations.strategies.arguments import CHECKPOINT_KEY
from lightning_dist.integrations.strategies.model_parallel import ModelParallelArguments
from lightning_dist.integrations.torch.fsdp.attach import ShardedExchange
from lightning_dist.integrations.torch.fsdp.replicas import ShardedGradients
from lightning_dist.log import get_logger

log = get_logger(__name__)

_METADATA_FILENAME = "meta.pt"
"""File in a folder that Lightning has written by torch.distributed.checkpoint."""


class CompressedModelParallelStrategy(
    CompressingStrategy, ModelParallelArguments, FollowsLauncher, ModelParallelStrategy
):
    """FSDP2 inside replicas, compressed gradients between them.

    The module's ``configure_model`` is that of ``ModelParallelStrategy``: it calls ``fully_shard``
    with ``self.device_mesh["data_parallel"]``, and where it splits layers, ``parallelize_module``
    with ``self.device_mesh["tensor_parallel"]``. Each replica is one host by default. Micro-batches
    of ``accumulate_grad_batches`` before the last send nothing between replicas.

    Arguments: see :class:`.ModelParallelArguments`, and everything else that
    ``ModelParallelStrategy`` takes.

    Residuals of all replicas, with ``parameters=`` of all ranks, are in the checkpoint under
    ``"lightning_dist"``. Such a checkpoint loads under plain ``ModelParallelStrategy`` and a plain
    one loads here.
    """

    _exchange: ShardedExchange | None = None

    @override
    def setup_environment(self) -> None:
        # Not that of ModelParallelStrategy, whose mesh has no replicas.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = self._replicated_mesh()
        assert self.lightning_module is not None
        give_device_mesh(self.lightning_module, self._device_mesh)
        self._before_setup()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for optimizer in self.optimizers:
            self._require_optimizer(optimizer)
        assert self.model is not None
        self._logged_step = 0
        self._exchanges.clear()
        exchange = self._compress(
            self.model, precision=self.precision_plugin, continue_from=self._reducer
        )
        self._exchange = exchange
        self._reducer = exchange.reducer if isinstance(exchange, ShardedGradients) else None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._exchange is not None:
            self._exchange.begin()  # steps need not call the module itself

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Send nothing between replicas; gradients stay sharded."""
        with nullcontext() if self._exchange is None else self._exchange.no_sync():
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not isinstance(self.checkpoint_io, CheckpointerIO):
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return self.lightning_module.state_dict(keep_vars=True)  # shards; tied ones are one object

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not isinstance(self.checkpoint_io, CheckpointerIO):
            return super().optimizer_state(optimizer)
        return optimizer.state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        io = self.checkpoint_io if isinstance(self.checkpoint_io, CheckpointerIO) else None
        # Called on all ranks. Weights-only checkpoints have no optimizer states.
        if self._exchange is not None and "optimizer_states" in checkpoint:
            owner = self._exchange
            state = owner.state_dict() if io is None else io.striped_state_of(owner)
            if state is not None:
                checkpoint[CHECKPOINT_KEY] = state
        if io is None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        from lightning_dist.integrations.lightning.checkpoint.shards import leave_shards

        leave_shards(checkpoint, io, self.device_mesh, self.optimizers)
        Strategy.save_checkpoint(self, checkpoint, filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = self._load_agreed(os.fspath(self.broadcast(checkpoint_path)), weights_only)
        if self._exchange is not None:
            self._load_state(self._exchange, checkpoint.get(CHECKPOINT_KEY))
        elif self.optimizers and CHECKPOINT_KEY in checkpoint and self.is_global_zero:
            log.warning(
                "The checkpoint has residuals of several replicas, and one replica compresses "
                "nothing: the residuals are dropped"
            )
        return checkpoint

    def _load_agreed(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Load what AsyncCheckpoint has written, or by Lightning's way what is another's."""
        from lightning_dist.checkpoint.disk.verify import describe
        from lightning_dist.checkpoint.ranks import Ranks
        from lightning_dist.integrations.lightning.checkpoint.resume import ResumeCheckpointIO
        from lightning_dist.integrations.lightning.checkpoint.shards import load_shards

        module, io = self.lightning_module, self.checkpoint_io
        assert module is not None
        if (Path(path) / _METADATA_FILENAME).is_file():  # of torch.distributed.checkpoint
            return super().load_checkpoint(path, weights_only=weights_only)
        if not isinstance(io, ResumeCheckpointIO):  # there is no AsyncCheckpoint
            io = ResumeCheckpointIO(verify="resume", trainer=module.trainer)
        path = io.agree(path)
        ranks = Ranks(dist.group.WORLD, device=self.root_device)
        if ranks.on_each(lambda: describe(path)).kind != "sharded":
            return super().load_checkpoint(path, weights_only=weights_only)
        exchange, optimizers = self._exchange, self.optimizers
        checkpoint = ranks.on_each(
            lambda: load_shards(
                path, module, optimizers, weights_only=weights_only, exchange=exchange
            )
        )
        return checkpoint
