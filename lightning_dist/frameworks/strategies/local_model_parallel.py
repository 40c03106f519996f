"""The arguments of local updates whose workers are sharded models, Lightning's and Fabric's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.frameworks.strategies.local_updates import LocalUpdateArguments
from lightning_dist.settings.local_updates import ShardedLocalUpdateSettings
from lightning_dist.settings.signatures import refuse_codec_options, takes
from lightning_dist.sync.local.sharded_state import ShardedWorkerStates
from lightning_dist.sync.mesh import DIMENSIONS, ReplicatedMesh


class ShardedLocalArguments(LocalUpdateArguments, ReplicatedMesh):
    """Mixin before a ``ModelParallelStrategy`` whose replicas are workers."""

    _kind_of_states = ShardedWorkerStates

    if TYPE_CHECKING:
        _states: ShardedWorkerStates | None

    @takes(ShardedLocalUpdateSettings)
    def __init__(self, settings: ShardedLocalUpdateSettings, **kwargs: Any) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            **kwargs: see :class:`.ReplicatedMesh`, whose replicas are the workers, and everything
                else that ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        if kwargs.get("tensor_parallel_size", 1) != 1:
            raise ValueError(
                "Local updates need a model that is sharded over one dimension, got "
                f"tensor_parallel_size={kwargs['tensor_parallel_size']!r}; leave it out, or use "
                "CompressedModelParallelStrategy"
            )
        refuse_codec_options(kwargs, settings.codec, of=type(self))
        super().__init__(settings, **kwargs)
        if self._replicas != "rank":
            raise ValueError(
                f"replicas={self._replicas!r} is for models that each rank has as a whole, and "
                "here all ranks of a node are one worker; leave it out"
            )

    def _require_workers(self, mesh: DeviceMesh) -> None:
        """Raise ValueError unless there are several workers."""
        workers, ranks = (mesh[name].size() for name in DIMENSIONS[:2])
        if workers == 1:
            raise ValueError(
                f"Local updates need several workers, got one node of {ranks} ranks; start several "
                "nodes, or give replicate_size=, the number of workers"
            )
