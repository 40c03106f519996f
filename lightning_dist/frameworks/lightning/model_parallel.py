"""``Trainer(strategy="compressed_model_parallel")``."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.log import get_logger
from lightning_dist.frameworks.lightning.base import CompressingStrategy
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.frameworks.lightning.sharded import ShardedStrategy
from lightning_dist.frameworks.strategies.arguments import CHECKPOINT_KEY
from lightning_dist.frameworks.strategies.model_parallel import ModelParallelArguments
from lightning_dist.sync.fsdp.attach import ShardedExchange
from lightning_dist.sync.fsdp.replicas import ShardedGradients

if TYPE_CHECKING:
    from lightning_dist.checkpoint.snapshot.shards import LazyState
    from lightning_dist.frameworks.lightning.checkpoint.shards import TakesOwnPart

log = get_logger(__name__)


class CompressedModelParallelStrategy(CompressingStrategy, ModelParallelArguments, ShardedStrategy):
    """FSDP2 inside replicas, compressed gradients between them.

    The module's ``configure_model`` is that of ``ModelParallelStrategy``: it calls ``fully_shard``
    with ``self.device_mesh["data_parallel"]``, and where it splits layers, ``parallelize_module``
    with ``self.device_mesh["tensor_parallel"]``. Each replica is one node by default. Micro-batches
    of ``accumulate_grad_batches`` before the last send nothing between replicas.

    Arguments: see :class:`.ModelParallelArguments`, and everything else that
    ``ModelParallelStrategy`` takes.

    Residuals of all replicas, with ``parameters=`` of all ranks, are in the checkpoint under
    ``"lightning_dist"``. Such a checkpoint loads under plain ``ModelParallelStrategy`` and a plain
    one loads here.
    """

    _exchange: ShardedExchange | None = None

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
            self._exchange.backward.begin()  # steps need not call the module itself

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._exchange is not None:
            self._exchange.backward.watch(closure_loss)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Send nothing between replicas; gradients stay sharded."""
        with nullcontext() if self._exchange is None else self._exchange.no_sync():
            yield

    @override
    def _add_state(self, checkpoint: dict[str, Any], io: CheckpointerIO | None) -> None:
        owner = self._exchange
        if owner is not None:
            state = owner.state_dict() if io is None else io.spread_state_of(owner)
            if state is not None:
                checkpoint[CHECKPOINT_KEY] = state

    @property
    @override
    def _own_parts(self) -> Mapping[str, TakesOwnPart]:
        exchange = self._exchange
        if exchange is None:
            return {CHECKPOINT_KEY: lambda state, lazy: {}}

        def own(state: Any, lazy: LazyState) -> Any:
            is_ours = isinstance(state, Mapping)
            return exchange.own_state(state, read=lazy.run) if is_ours else lazy.whole(state)

        return {CHECKPOINT_KEY: own}

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = self._read(checkpoint_path, weights_only)
        if self._exchange is not None:
            self._load_state(self._exchange, checkpoint.get(CHECKPOINT_KEY))
        elif self.optimizers and CHECKPOINT_KEY in checkpoint and self.is_global_zero:
            log.warning(
                "The checkpoint has residuals of several replicas, and one replica compresses "
                "nothing: the residuals are dropped"
            )
        return checkpoint
