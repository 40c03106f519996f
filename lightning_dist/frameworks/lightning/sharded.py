"""Base of the strategies for the Trainer that shard a model inside of every node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.frameworks.lightning.launcher import FollowsLauncher
from lightning_dist.frameworks.lightning.private import give_device_mesh, restricted
from lightning_dist.frameworks.strategies.other_package import OfOneFramework
from lightning_dist.sync.mesh import ReplicatedMesh

if TYPE_CHECKING:
    from lightning_dist.frameworks.lightning.checkpoint.shards import TakesOwnPart

_METADATA_FILENAME = "meta.pt"
"""File in a folder that Lightning has written by torch.distributed.checkpoint."""


class ShardedStrategy(OfOneFramework, ReplicatedMesh, FollowsLauncher, ModelParallelStrategy):
    """``ModelParallelStrategy`` over several nodes, whose ranks save and load their own parts.

    After a :class:`.CompressingStrategy`.
    """

    if TYPE_CHECKING:

        def _before_setup(self) -> None: ...

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
        if "optimizer_states" in checkpoint:
            self._add_state(checkpoint, io)
        if io is None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        from lightning_dist.frameworks.lightning.checkpoint.shards import leave_shards

        leave_shards(checkpoint, io, self.device_mesh, self.optimizers)
        Strategy.save_checkpoint(self, checkpoint, filepath)

    def _add_state(self, checkpoint: dict[str, Any], io: CheckpointerIO | None) -> None:
        """Add what an exact restart needs. Collective.

        Args:
            io: leaves tensors where they are; None: rank 0 gets all.
        """
        raise NotImplementedError

    @property
    def _own_parts(self) -> Mapping[str, TakesOwnPart]:
        """Functions that read this rank's part of entries added by :meth:`_add_state`, by key."""
        raise NotImplementedError

    def _load_agreed(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Load what AsyncCheckpoint has written, or by Lightning's way what is another's."""
        from lightning_dist.checkpoint.disk.verify import describe
        from lightning_dist.frameworks.lightning.checkpoint.resume import ResumeCheckpointIO
        from lightning_dist.frameworks.lightning.checkpoint.shards import load_shards
        from lightning_dist.ranks.agreement import Ranks

        module, io = self.lightning_module, self.checkpoint_io
        assert module is not None
        if (Path(path) / _METADATA_FILENAME).is_file():  # of torch.distributed.checkpoint
            return super().load_checkpoint(path, **restricted(weights_only))
        if not isinstance(io, ResumeCheckpointIO):  # there is no AsyncCheckpoint
            io = ResumeCheckpointIO(verify="resume", trainer=module.trainer)
        path = io.agree(path)
        ranks = Ranks(dist.group.WORLD, device=self.root_device)
        if ranks.on_each(lambda: describe(path)).kind != "sharded":
            return super().load_checkpoint(path, **restricted(weights_only))
        own_parts, optimizers = self._own_parts, self.optimizers
        checkpoint = ranks.on_each(
            lambda: load_shards(
                path, module, optimizers, weights_only=weights_only, own_parts=own_parts
            )
        )
        return checkpoint

    def _read(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """The checkpoint at the path that rank 0 has, of which model and optimizers are loaded."""
        return self._load_agreed(os.fspath(self.broadcast(path)), weights_only)
