"""The arguments of local updates whose workers are sharded models, Lightning's and Fabric's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.codecs import Codec
from lightning_dist.frameworks.strategies.local_updates import LocalUpdateArguments
from lightning_dist.sync.arguments import refuse_codec_options
from lightning_dist.sync.fsdp.settings import sharded_settings
from lightning_dist.sync.local.sharded_state import ShardedWorkerStates
from lightning_dist.sync.mesh import DIMENSIONS, ReplicatedMesh

_OF_OTHERS = {
    "parameters": "FSDP gathers parameters inside a node itself; leave it out, or use "
    "CompressedModelParallelStrategy",
    "hierarchical": "each rank exchanges its shard; leave it out",
    "ranks_per_node": "replicate_size is the number of workers",
    "rank_groups": "replicate_size is the number of workers",
    "commit": "local updates have no step to undo; leave it out",
}
"""Arguments of strategies that compress gradients, and why they have no effect here."""


class _Exchange(ReplicatedMesh):
    """Mixin before a ``ModelParallelStrategy``: codec between nodes, and the mesh."""

    def __init__(
        self,
        codec: str | Codec | dict[str, Any],
        *,
        error_feedback: bool | Literal["auto"] = "auto",
        min_compress_numel: int | None = None,
        exchange_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_codec_options(kwargs, codec, of=type(self))
        self._settings = sharded_settings(
            codec,
            error_feedback=error_feedback,
            min_compress_numel=min_compress_numel,
            exchange_timeout=exchange_timeout,
            compile_kernels=False,
        )
        super().__init__(**kwargs)


class ShardedLocalArguments(LocalUpdateArguments, _Exchange):
    """Mixin before a ``ModelParallelStrategy`` whose replicas are workers."""

    _kind_of_states = ShardedWorkerStates

    if TYPE_CHECKING:
        _states: ShardedWorkerStates | None

    def __init__(
        self,
        *args: Any,
        replicate_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        error_feedback: bool | Literal["auto"] = "auto",
        min_compress_numel: int | None = None,
        exchange_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            *args: see :class:`.LocalUpdateArguments`.
            replicate_size: workers. ``"auto"``: as many as nodes, so that each node is one.
            data_parallel_size: ranks that shard the model of a worker. ``"auto"``: all that are
                left.
            error_feedback: as for :func:`~lightning_dist.local_updates`, and so are the next two.
            min_compress_numel: elements; smaller tensors, and 1-D ones, are uncompressed.
            exchange_timeout: seconds of one wait for other ranks, with gloo.
            **kwargs: see :class:`.LocalUpdateArguments`, and everything else that
                ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        for name, why in _OF_OTHERS.items():
            if name in kwargs:
                raise ValueError(
                    f"{name}={kwargs[name]!r} has no effect on local updates of a sharded model: "
                    f"{why}"
                )
        if kwargs.get("tensor_parallel_size", 1) != 1:
            raise ValueError(
                "Local updates need a model that is sharded over one dimension, got "
                f"tensor_parallel_size={kwargs['tensor_parallel_size']!r}; leave it out, or use "
                "CompressedModelParallelStrategy"
            )
        super().__init__(
            *args,
            replicate_size=replicate_size,
            data_parallel_size=data_parallel_size,
            error_feedback=error_feedback,
            min_compress_numel=min_compress_numel,
            exchange_timeout=exchange_timeout,
            **kwargs,
        )
        if self._replicas != "rank":
            raise ValueError(
                f"replicas={self._replicas!r} is for models that each rank has as a whole, and "
                "here all ranks of a node are one worker; leave it out"
            )
        if self._schedule.ddp_steps:
            raise ValueError(
                "ddp_steps are steps of plain DDP, which needs the whole model on each rank, got "
                f"ddp_steps={self._schedule.ddp_steps}; leave it out (method='local_sgd' in the "
                "place of 'post_local_sgd'), and begin from a checkpoint of "
                "CompressedModelParallelStrategy"
            )

    def _require_workers(self, mesh: DeviceMesh) -> None:
        """Raise ValueError unless there are several workers."""
        workers, ranks = (mesh[name].size() for name in DIMENSIONS[:2])
        if workers == 1:
            raise ValueError(
                f"Local updates need several workers, got one node of {ranks} ranks; start several "
                "nodes, or give replicate_size=, the number of workers"
            )
