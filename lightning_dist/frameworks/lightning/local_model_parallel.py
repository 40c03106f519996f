"""``Trainer(strategy="compressed_model_parallel_diloco")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dist.base.private import map_tensors
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.frameworks.lightning.local_updates import LocalSteps
from lightning_dist.frameworks.lightning.sharded import ShardedStrategy
from lightning_dist.frameworks.strategies.local_model_parallel import ShardedLocalArguments
from lightning_dist.frameworks.strategies.local_updates import LOCAL_KEY

if TYPE_CHECKING:
    from lightning_dist.frameworks.lightning.checkpoint.shards import TakesOwnPart


class LocalUpdateModelParallelStrategy(LocalSteps, ShardedLocalArguments, ShardedStrategy):
    """FSDP2 inside nodes, and outer steps on the compressed mean of what each node has changed.

    The module's ``configure_model`` is that of ``ModelParallelStrategy``: it calls ``fully_shard``
    with ``self.device_mesh["data_parallel"]``, the ranks of a node, which are one worker. Each rank
    exchanges its shard.

    Arguments: see :class:`.LocalUpdateArguments` and :class:`.ShardedLocalArguments`, and
    everything else that ``ModelParallelStrategy`` takes.

    A checkpoint holds the anchor as the model's weights, so that it loads under
    ``ModelParallelStrategy``, and under ``"lightning_dist_local_updates"`` what every worker has of
    its own, in whole parameters, collected by rank 0; with ``AsyncCheckpoint(format="sharded")``
    every rank writes and reads its part. With another number of workers it is as of
    :class:`~lightning_dist.LocalUpdateStrategy`.
    """

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._updates = self._states = self._reducer = None  # of an earlier fit
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        self._require_workers(self.device_mesh)
        self._begin_updates(trainer, self.model)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._updates is None:
            return super().lightning_module_state_dict()
        if isinstance(self.checkpoint_io, CheckpointerIO):
            return self._updates.anchor_state_dict()
        with self._updates.anchor_weights():
            found = super().lightning_module_state_dict()
            # On a CPU they are the parameters themselves.
            copied: dict[str, Any] = map_tensors(lambda each: each.detach().clone(), found)
        return copied

    @override
    def _add_state(self, checkpoint: dict[str, Any], io: CheckpointerIO | None) -> None:
        if self._states is None:
            return
        self._add_workers(checkpoint, self.checkpoint_io)
        if io is None and self._save_distributed_checkpoint and not self._states.is_of_first:
            checkpoint["optimizer_states"] = []  # not a mixture of the workers'

    @property
    @override
    def _own_parts(self) -> Mapping[str, TakesOwnPart]:
        states = self._states
        if states is None:
            return {LOCAL_KEY: lambda state, lazy: None}
        return {LOCAL_KEY: lambda state, lazy: states.own_state(state, read=lazy.run)}

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = self._read(checkpoint_path, weights_only)
        state = checkpoint.pop(LOCAL_KEY, None)
        if self._states is None or self._updates is None:
            return checkpoint
        if state is None:  # of another strategy
            self._updates.anchor_from_weights()
            return checkpoint
        own = self._states.own_state(state) if "workers" in state else state
        scaler = own["scaler"]
        self._states.load_own_state(own)
        name = type(self.precision_plugin).__qualname__
        if scaler and name in checkpoint:  # Lightning restores it later
            checkpoint[name] = scaler
        return checkpoint
