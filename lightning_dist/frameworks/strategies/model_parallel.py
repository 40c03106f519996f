"""Base of both CompressedModelParallelStrategy: arguments, bytes and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import loss_scale_of
from lightning_dist.codecs import Codec
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.options import OF_DDP, OF_LOCAL
from lightning_dist.sync.arguments import refuse_codec_options
from lightning_dist.sync.fsdp.attach import (
    ShardedExchange,
    attach_replicas,
    attach_shards,
)
from lightning_dist.sync.fsdp.replicas import ShardedGradients
from lightning_dist.sync.fsdp.settings import ShardSettings, sharded_settings
from lightning_dist.sync.fsdp.shards import CompressedShards
from lightning_dist.sync.in_force import show
from lightning_dist.sync.mesh import DIMENSIONS, ReplicatedMesh
from lightning_dist.sync.onebit_adam import OneBitAdam
from lightning_dist.sync.report import CommReport, Reports
from lightning_dist.sync.rules import require_one_momentum

log = get_logger(__name__)


class ModelParallelArguments(CommReport, ReplicatedMesh):
    """Mixin before a ``ModelParallelStrategy`` that compresses gradients between replicas."""

    if TYPE_CHECKING:
        _timeout: timedelta | None

    def __init__(
        self,
        codec: str | Codec | dict[str, Any] = "int8",
        *,
        replicate_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        parameters: str | Codec | None = None,
        error_feedback: bool | Literal["auto"] = "auto",
        min_compress_numel: int | None = None,
        start_step: int = 0,
        compile_kernels: bool | Literal["auto"] = "auto",
        commit: Literal["auto", "immediate", "deferred"] = "auto",
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            codec: of the gradients between replicas: a name of ``lightning_dist.CODECS``, with
                options as in ``"topk:ratio=0.01"``, a codec object, or a policy (``by_name``,
                ``by_size``, ``warmup``, ``after_steps``).
            replicate_size: replicas of the model. ``"auto"``: one per node.
            data_parallel_size: ranks that shard a replica. ``"auto"``: all others.
            tensor_parallel_size: ranks that have a part of each layer, within a shard.
            parameters: codec of the parameters in FSDP's all-gather, for one replica that is
                sharded over all ranks. Gradients are then reduce-scattered in ``codec``, which must
                be unbiased, such as ``"qsgd:bits=8"``, or have ``error_feedback=True``.
            error_feedback: keep the compression error and add it to the next gradient; 4 bytes per
                compressed element of a shard. ``"auto"``: where the codec needs it.
            min_compress_numel: smaller parameters, and 1-D ones, are uncompressed; 0 compresses
                all. None: the codec's own choice.
            start_step: synchronised steps before compression starts.
            compile_kernels: fuse the codec's kernels at set-up (about 20 s the first time).
                ``"auto"``: for shards of 4 Mi elements or more, and on an accelerator with Triton.
            commit: when residuals are written, as for ``CompressedDDPStrategy``.
            **kwargs: everything else that ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        if given := kwargs.keys() & (set(OF_LOCAL) - set(OF_DDP)):
            raise ValueError(
                f"{type(self).__name__} exchanges gradients in every step and takes no local ones, "
                f"got {', '.join(sorted(given))}; use LocalUpdateModelParallelStrategy"
            )
        refuse_codec_options(kwargs, codec, of=type(self))
        self._settings = sharded_settings(
            codec,
            error_feedback=error_feedback,
            min_compress_numel=min_compress_numel,
            start_step=start_step,
            compile_kernels=compile_kernels,
            commit=commit,
        )
        self._shard_settings: ShardSettings | None = None
        if parameters is not None:
            replicate_size = 1 if replicate_size == "auto" else replicate_size
            if replicate_size != 1 or tensor_parallel_size != 1:
                raise ValueError(
                    "parameters= is for one replica that is sharded over all ranks, got "
                    f"replicate_size={replicate_size} and "
                    f"tensor_parallel_size={tensor_parallel_size}; leave both out, or parameters="
                )
            self._shard_settings = ShardSettings.check(self._settings, parameters)
        self._exchanges: list[ShardedExchange] = []  # of the models, in their order
        super().__init__(
            replicate_size=replicate_size,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            **kwargs,
        )

    @property
    def reducers(self) -> list[Reducer]:
        """Of the models, in their order; none with ``parameters=``."""
        return [each.reducer for each in self._exchanges if isinstance(each, ShardedGradients)]

    @property
    def _reports(self) -> Sequence[Reports]:
        return self._exchanges

    @property
    def shards(self) -> CompressedShards | None:
        """The quantised collectives of the model, of the last one; None without ``parameters=``."""
        found = [each for each in self._exchanges if isinstance(each, CompressedShards)]
        return found[-1] if found else None

    def _replicated_mesh(self) -> DeviceMesh:
        mesh = super()._replicated_mesh()
        alone = mesh[DIMENSIONS[0]].size() == 1
        if alone and dist.get_rank() == 0 and self._shard_settings is None:
            log.warning(
                "One replica: nothing crosses between nodes and nothing is compressed, codec %s "
                "takes effect with two nodes or more, or with replicate_size=",
                self._settings.codec,
            )
        return mesh

    def _require_optimizer(self, optimizer: Optimizer) -> None:
        require_one_momentum(optimizer, self._settings)
        if isinstance(optimizer, OneBitAdam):
            raise ValueError(
                "OneBitAdam exchanges momenta of whole parameters, and here they are sharded; use "
                "torch.optim.AdamW"
            )

    def _compress(
        self, model: nn.Module, *, precision: Any, continue_from: Reducer | None = None
    ) -> ShardedExchange | None:
        """Compress what ``model`` sends; None where nothing is, with one replica. Collective.

        Args:
            precision: the plugin, which may have a GradScaler.
        """
        mesh, grad_scale = self.device_mesh, loss_scale_of(getattr(precision, "scaler", None))
        if self._shard_settings is not None:
            settings, own = self._shard_settings, mesh[DIMENSIONS[1]]
            shards = attach_shards(model, settings, mesh=own, grad_scale=grad_scale)
            self._exchanges.append(shards)
            if dist.get_rank() == 0:
                show(
                    lambda: (
                        f"compressed FSDP2 over {own.size()} ranks: parameters in "
                        f"{settings.parameters}, gradients in {settings.gradients}"
                    )
                )
            return shards
        if mesh[DIMENSIONS[0]].size() == 1:
            return None
        gradients = attach_replicas(
            model,
            self._settings,
            mesh=mesh[DIMENSIONS[:2]],
            continue_from=continue_from,
            grad_scale=grad_scale,
        )
        if dist.get_rank() == 0:
            sizes = dict(zip(DIMENSIONS, mesh.shape, strict=True))
            show(lambda: f"compressed FSDP2: codec {self._settings.codec}, mesh {sizes}")
        self._exchanges.append(gradients)
        return gradients

    def _load_state(self, exchange: ShardedExchange, state: Mapping[str, Any] | None) -> None:
        """Go on from ``exchange.state_dict()``, the same on every rank; None starts afresh."""
        if state is not None and ("steps" in state) != isinstance(exchange, CompressedShards):
            if dist.get_rank() == 0:
                log.warning(
                    "The checkpoint is of a run that was compressed in the other way, between "
                    "replicas or, with parameters=, over all ranks: residuals are dropped"
                )
            state = None
        exchange.load_state_dict(state)
