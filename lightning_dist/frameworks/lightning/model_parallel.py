"""Strategies of the Trainer whose modules are sharded inside of every node by ``fully_shard``."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.log import get_logger
from lightning_dist.frameworks.lightning.base import SyncStrategy
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO, add_state
from lightning_dist.frameworks.lightning.launcher import init_process_group
from lightning_dist.frameworks.lightning.private import give_device_mesh, restricted
from lightning_dist.settings.exchange import ExchangeSettings, MeshSettings, ShardedSettings
from lightning_dist.settings.local_updates import Replicas, ShardedLocalUpdateSettings
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.arguments import require_sharded_arguments
from lightning_dist.sync.base import Environment, Sync
from lightning_dist.sync.fsdp.replicas import kind_of
from lightning_dist.sync.fsdp.shards import CompressedShards
from lightning_dist.sync.local.anchor import evaluates_anchor, require_shards_as_workers
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.updates import LocalSync
from lightning_dist.sync.networks import (
    exchange_mesh,
    replicated_mesh,
    require_sizes,
    sampler_arguments,
)

log = get_logger(__name__)

_METADATA_FILENAME = "meta.pt"
"""File in a folder that Lightning has written by torch.distributed.checkpoint."""


class SyncModelParallelStrategy(SyncStrategy, ModelParallelStrategy):
    """``ModelParallelStrategy`` over several nodes, whose ranks save and load their own parts.

    Its device mesh has the dimensions ``"replicate"``, ``"data_parallel"`` and
    ``"tensor_parallel"``. ``fully_shard`` is called with ``device_mesh["data_parallel"]``, as under
    ``ModelParallelStrategy``: these are the ranks of one replica.
    """

    @takes(MeshSettings, "sizes")
    def __init__(self, settings: ExchangeSettings, sizes: MeshSettings, **kwargs: Any) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: of the exchange between replicas, or of the collectives of one.
            sizes: each an argument of the strategy.
            **kwargs: everything else that ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        require_sharded_arguments(type(self), settings, kwargs)
        require_sizes(settings, sizes)
        self._sizes = sizes
        super().__init__(settings, **kwargs)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampler_arguments(self.device_mesh)

    @override
    def _setup_distributed(self) -> None:
        init_process_group(self)
        super()._setup_distributed()

    @override
    def setup_environment(self) -> None:
        # Not that of ModelParallelStrategy, whose mesh has no replicas.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = replicated_mesh(self._settings, self._sizes, device=self.root_device)
        assert self.lightning_module is not None
        give_device_mesh(self.lightning_module, self._device_mesh)
        self._before_setup()

    @override
    def _environment(self, **facts: Any) -> Environment:
        return super()._environment(mesh=exchange_mesh(self._settings, self.device_mesh), **facts)

    @override
    def _attach_with_optimizers(self) -> None:
        environment = self._environment()
        if environment.mesh is None:
            self.sync = None
        else:
            assert self.model is not None
            self._attach(self.model, environment)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Send nothing between replicas; gradients stay sharded."""
        with nullcontext() if self._active is None else self._active.no_sync():
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        leaves_shards = isinstance(self.checkpoint_io, CheckpointerIO)
        stock = super().lightning_module_state_dict
        if leaves_shards:
            module = self.lightning_module
            assert module is not None

            def stock() -> dict[str, Any]:  # shards; tied ones are one object
                return module.state_dict(keep_vars=True)

        if self.sync is None:
            return stock()
        return self.sync.weights_to_save(stock, leaves_shards=leaves_shards)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not isinstance(self.checkpoint_io, CheckpointerIO):
            return super().optimizer_state(optimizer)
        return optimizer.state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        io: Any = self.checkpoint_io
        is_ours, sync = isinstance(io, CheckpointerIO), self.sync
        # Called on all ranks. Weights-only checkpoints have no optimizer states.
        if sync is not None and "optimizer_states" in checkpoint:
            add_state(checkpoint, sync, io)
            if not is_ours and self._save_distributed_checkpoint and not sync.saves_optimizers:
                checkpoint["optimizer_states"] = []  # not a mixture of the workers'
        if not is_ours:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        from lightning_dist.frameworks.lightning.checkpoint.sharded_checkpoint import leave_shards

        leave_shards(checkpoint, io, self.device_mesh, self.optimizers)
        Strategy.save_checkpoint(self, checkpoint, filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = os.fspath(self.broadcast(checkpoint_path))
        checkpoint, has_own_part = self._read(path, weights_only)
        sync = self.sync
        if sync is None:
            if self.optimizers and Sync.key in checkpoint and self.is_global_zero:
                log.warning(
                    "The checkpoint has residuals of several replicas, and one replica compresses "
                    "nothing: the residuals are dropped"
                )
            return checkpoint
        state = checkpoint.get(sync.key)
        if has_own_part:
            sync.load_own_state(state)
        else:
            sync.load_state_dict(state)
        name = type(self.precision_plugin).__qualname__
        if sync.loads_scaler and state is not None and name in checkpoint:
            checkpoint[name] = self.precision_plugin.state_dict()  # Lightning restores it later
        return checkpoint

    def _read(self, path: str, weights_only: bool | None) -> tuple[dict[str, Any], bool]:
        """A checkpoint of which model and optimizers are loaded.

        Returns:
            All the rest of it, and whether the state of the sync in it is this rank's part alone,
            as of one that AsyncCheckpoint has written; others are read in Lightning's way.
        """
        from lightning_dist.checkpoint.disk.scan import describe
        from lightning_dist.frameworks.lightning.checkpoint.resume import ResumeCheckpointIO
        from lightning_dist.frameworks.lightning.checkpoint.sharded_checkpoint import load_shards
        from lightning_dist.ranks.agreement import Ranks

        module, io = self.lightning_module, self.checkpoint_io
        assert module is not None
        if (Path(path) / _METADATA_FILENAME).is_file():  # of torch.distributed.checkpoint
            return super().load_checkpoint(path, **restricted(weights_only)), False
        if not isinstance(io, ResumeCheckpointIO):  # there is no AsyncCheckpoint
            io = ResumeCheckpointIO(verify="resume", trainer=module.trainer)
        path = io.agree(path)
        ranks = Ranks(dist.group.WORLD, device=self.root_device)
        if ranks.on_each(lambda: describe(path)).kind != "sharded":
            return super().load_checkpoint(path, **restricted(weights_only)), False
        sync, optimizers = self.sync, self.optimizers
        checkpoint = ranks.on_each(
            lambda: load_shards(path, module, optimizers, weights_only=weights_only, sync=sync)
        )
        return checkpoint, True


class CompressedModelParallelStrategy(SyncModelParallelStrategy):
    """FSDP2 inside replicas, compressed gradients between them.

    The module's ``configure_model`` is that of ``ModelParallelStrategy``: it calls ``fully_shard``
    with ``self.device_mesh["data_parallel"]``, and where it splits layers, ``parallelize_module``
    with ``self.device_mesh["tensor_parallel"]``. Each replica is one node by default. Micro-batches
    of ``accumulate_grad_batches`` before the last send nothing between replicas.

    Residuals of all replicas, with ``parameters=`` of all ranks, are in the checkpoint under
    ``"lightning_dist"``. Such a checkpoint loads under plain ``ModelParallelStrategy`` and a plain
    one loads here.
    """

    @takes(ShardedSettings)
    def __init__(self, settings: ShardedSettings, **kwargs: Any) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            **kwargs: see :class:`.SyncModelParallelStrategy`, and everything else that
                ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        super().__init__(settings, **kwargs)

    @override
    def kind_of_sync(self) -> type[Sync]:
        assert isinstance(self._settings, ShardedSettings)
        return kind_of(self._settings)

    @property
    def shards(self) -> CompressedShards | None:
        """The quantised collectives of the module; None without ``parameters=``."""
        return self.sync if isinstance(self.sync, CompressedShards) else None


class LocalUpdateModelParallelStrategy(SyncModelParallelStrategy):
    """FSDP2 inside nodes, and outer steps on the compressed mean of what each node has changed.

    The module's ``configure_model`` is that of ``ModelParallelStrategy``: it calls ``fully_shard``
    with ``self.device_mesh["data_parallel"]``, the ranks of a node, which are one worker. Each rank
    exchanges its shard.

    A checkpoint holds the anchor as the model's weights, so that it loads under
    ``ModelParallelStrategy``, and under ``"lightning_dist_local_updates"`` what every worker has of
    its own, in whole parameters, collected by rank 0; with ``AsyncCheckpoint(format="sharded")``
    every rank writes and reads its part. With another number of workers it is as of
    :class:`~lightning_dist.LocalUpdateStrategy`.
    """

    sync: LocalSync | None = None

    @takes(ShardedLocalUpdateSettings)
    def __init__(
        self,
        settings: ShardedLocalUpdateSettings,
        *,
        replicas: Replicas = "rank",
        evaluate: Literal["anchor", "worker"] = "anchor",
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            replicas: must be ``"rank"``: all ranks of a node are one worker.
            evaluate: as of :class:`~lightning_dist.LocalUpdateStrategy`.
            **kwargs: see :class:`.SyncModelParallelStrategy`, whose replicas are the workers, and
                everything else that ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        require_shards_as_workers(replicas)
        self._evaluates_shared_weights = evaluates_anchor(evaluate)
        super().__init__(settings, **kwargs)

    @override
    def kind_of_sync(self) -> type[Sync]:
        return LocalSync

    @property
    def updates(self) -> LocalUpdates | None:
        """The outer steps; None before the module is set up."""
        return None if self.sync is None else self.sync.updates
