"""``Trainer(strategy="compressed_model_parallel")``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dist.integrations.arguments import CHECKPOINT_KEY
from lightning_dist.integrations.lightning.before_setup import call_before_setup
from lightning_dist.integrations.lightning.launcher import FollowsLauncher, init_process_group
from lightning_dist.integrations.lightning.private import give_device_mesh
from lightning_dist.integrations.lightning.reporting import ReportsCommunication
from lightning_dist.integrations.model_parallel import ModelParallelArguments
from lightning_dist.integrations.refusals import refuse_pytorch_lightning
from lightning_dist.integrations.torch.fsdp import ShardedGradients


class CompressedModelParallelStrategy(
    ReportsCommunication, ModelParallelArguments, FollowsLauncher, ModelParallelStrategy
):
    """FSDP2 inside replicas, compressed gradients between them.

    The module's ``configure_model`` is that of ``ModelParallelStrategy``: it calls ``fully_shard``
    with ``self.device_mesh["data_parallel"]``, and where it splits layers, ``parallelize_module``
    with ``self.device_mesh["tensor_parallel"]``. Each replica is one host by default. Micro-batches
    of ``accumulate_grad_batches`` before the last send nothing between replicas.

    Arguments: see
    :class:`~lightning_dist.integrations.model_parallel.ModelParallelArguments`, and everything
    else that ``ModelParallelStrategy`` takes.

    Residuals of all replicas are in the checkpoint under ``"lightning_dist"``. Such a checkpoint
    loads under plain ``ModelParallelStrategy`` and a plain one loads here.
    """

    _gradients: ShardedGradients | None = None

    @override
    def connect(self, model: pl.LightningModule) -> None:
        refuse_pytorch_lightning(model=model)
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        # Not that of ModelParallelStrategy, whose mesh has no replicas.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = self._replicated_mesh()
        assert self.lightning_module is not None
        give_device_mesh(self.lightning_module, self._device_mesh)
        call_before_setup(self.lightning_module)

    @override
    def _setup_distributed(self) -> None:
        init_process_group(self)
        super()._setup_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            refuse_pytorch_lightning(callback=callback)
        self._max_steps = trainer.max_steps
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for optimizer in self.optimizers:
            self._require_optimizer(optimizer)
        assert self.model is not None
        self._logged_step = 0
        self._gradients = self._compress(self.model, continue_from=self._reducer)
        self._reducer = None if self._gradients is None else self._gradients.reducer

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._gradients is not None:
            self._gradients.begin()  # steps need not call the module itself

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Send nothing between replicas; gradients stay sharded."""
        if self._gradients is None:
            yield
            return
        with self._gradients.no_sync():
            yield

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        # Called on all ranks. Weights-only checkpoints have no optimizer states.
        if self._gradients is not None and "optimizer_states" in checkpoint:
            state = self._state_of(self._gradients)
            if state is not None:
                checkpoint[CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._gradients is not None:
            self._load_state(self._gradients, checkpoint.get(CHECKPOINT_KEY))
        return checkpoint

    @override
    def teardown(self) -> None:
        try:
            if self._gradients is not None:
                self._gradients.close()  # raises where the device has failed
        finally:
            super().teardown()
