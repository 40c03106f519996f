"""FSDP2 through Accelerate, with compressed gradients between replicas."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from accelerate.utils import ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from lightning_dist.base.private import loss_scale_of
from lightning_dist.codecs import Codec
from lightning_dist.frameworks.accelerate import private
from lightning_dist.frameworks.accelerate.attach import (
    is_wrapped_by,
    print_outside,
    require_unprepared,
    wrap_method,
)
from lightning_dist.frameworks.accelerate.compression import Compression
from lightning_dist.settings import LEFT_OUT, Resolved, resolve
from lightning_dist.settings.exchange import Settings
from lightning_dist.settings.options import OF_SHARDS, require_of_shards
from lightning_dist.sync.fsdp.attach import (
    ShardedExchange,
    attach_replicas,
    attach_shards,
)
from lightning_dist.sync.fsdp.settings import ShardSettings, checked_settings
from lightning_dist.sync.rules import require_one_momentum

if TYPE_CHECKING:
    from accelerate import Accelerator

_MESH = ("dp_replicate", "dp_shard_cp")
"""Dimensions of Accelerate's mesh: replicas, and the shards of one."""


@dataclass(frozen=True)
class CompressedFSDPPlugin:
    """Arguments of :func:`lightning_dist.compress_fsdp`, for the model that Accelerate prepares.

    For an ``Accelerator`` with ``FullyShardedDataParallelPlugin(fsdp_version=2)`` and a
    ``ParallelismConfig`` of several replicas (HSDP): those are averaged by us, compressed; or, with
    ``parameters``, without replicas. What is left out comes from variables and files, as for
    :class:`CompressedDDPPlugin`.

    Args:
        codec: a name of ``lightning_dist.CODECS``, with options as in ``"topk:ratio=0.01"``, a
            codec object, or a policy.
        parameters: for a model that is sharded over all ranks: codec of the parameters in FSDP's
            all-gather; gradients are reduce-scattered in ``codec``, which has to be unbiased, such
            as ``"qsgd:bits=8"``, or to have ``error_feedback=True``, then in 8 bits.
        error_feedback: this and all others as for ``compress_fsdp``.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    codec: str | Codec | Mapping[str, Any] = LEFT_OUT
    _: KW_ONLY
    parameters: str | Codec | None = LEFT_OUT
    error_feedback: bool | Literal["auto"] = LEFT_OUT
    min_compress_numel: int | None = LEFT_OUT
    start_step: int = LEFT_OUT
    compile_kernels: bool | Literal["auto"] = LEFT_OUT
    commit: Literal["auto", "immediate", "deferred"] = LEFT_OUT
    _resolved: Resolved = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        resolved = resolve({name: getattr(self, name) for name in OF_SHARDS})
        object.__setattr__(self, "_resolved", resolved)
        for name in OF_SHARDS:
            object.__setattr__(self, name, resolved.value(name))
        with resolved.named_in_errors():
            require_of_shards(resolved.options)
            self._settings()

    def attach(self, accelerator: Accelerator) -> Compression:
        """Compress the gradients of the model that ``accelerator`` prepares from now on.

        In ``accelerator.accumulate`` and ``accelerator.no_sync`` nothing is sent between replicas,
        and gradients stay sharded. Residuals go with ``save_state`` and ``load_state``.

        Raises:
            ValueError: the Accelerator has not FSDP2 with several replicas, or with ``parameters``
                has several, or tensor parallelism; a model is prepared already, or a plugin
                attached.
        """
        settings = self._settings()
        _require_attachable(accelerator, replicas=isinstance(settings, Settings))
        compression = ShardedCompression(accelerator, settings)
        print_outside(accelerator, self._resolved)
        return compression

    def _settings(self) -> Settings | ShardSettings:
        return checked_settings(**{name: getattr(self, name) for name in OF_SHARDS})


class ShardedParallelism(ParallelismConfig):  # type: ignore[misc]  # it has no types
    """The user's configuration, of which FSDP gets only the dimension of the shards."""

    @property
    @override
    def fsdp_dim_names(self) -> list[str]:
        return [_MESH[1]]


class ShardedCompression(Compression):
    """The compression of one Accelerator; made by :meth:`CompressedFSDPPlugin.attach`."""

    def __init__(self, accelerator: Accelerator, settings: Settings | ShardSettings) -> None:
        self._of_all = settings if isinstance(settings, ShardSettings) else None
        super().__init__(
            accelerator, settings.given if isinstance(settings, ShardSettings) else settings
        )
        self._exchanges: dict[nn.Module, ShardedExchange] = {}
        wrap_method(accelerator, "prepare", self._prepare)
        if self._of_all is None:
            config = copy(accelerator.parallelism_config)
            config.__class__ = ShardedParallelism
            accelerator.state.parallelism_config = config
            wrap_method(accelerator, "no_sync", self._no_sync)

    def take_place(self) -> None:
        """Nothing: FSDP2 asks nobody for a hook."""

    def _prepare(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        for model in private.prepared_models(self._accelerator):
            if model not in self._exchanges:
                for optimizer in private.prepared_optimizers(self._accelerator):
                    require_one_momentum(optimizer.optimizer, self._settings)
                self._exchanges[model] = self._attach(model)
        return prepared

    def _attach(self, model: nn.Module) -> ShardedExchange:
        accelerator = self._accelerator
        grad_scale = loss_scale_of(accelerator.scaler)
        if self._of_all is not None:
            every = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
            return attach_shards(model, self._of_all, mesh=every, grad_scale=grad_scale)
        return attach_replicas(
            model,
            self._settings,
            mesh=accelerator.torch_device_mesh[_MESH],
            grad_scale=grad_scale,
        )

    def _no_sync(self, no_sync: Any, model: nn.Module) -> AbstractContextManager[None]:
        found = self._exchanges.get(model)
        context: AbstractContextManager[None] = found.no_sync() if found else no_sync(model)
        return context


def _require_attachable(accelerator: Accelerator, *, replicas: bool) -> None:
    if not accelerator.is_fsdp2:
        raise ValueError(
            "A CompressedFSDPPlugin compresses the gradients of FSDP2, got an Accelerator with "
            f"{accelerator.distributed_type}; give it "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or attach a CompressedDDPPlugin"
        )
    config = accelerator.parallelism_config
    if is_wrapped_by(accelerator, ShardedCompression):
        raise ValueError(
            "One CompressedFSDPPlugin can be attached to an Accelerator; attach it once"
        )
    has_replicas = config is not None and config.dp_replicate_enabled
    if replicas and not has_replicas:
        raise ValueError(
            "Gradients are compressed between replicas, and there is one; give the Accelerator "
            "parallelism_config=ParallelismConfig(dp_replicate_size=nodes, dp_shard_size=ranks of "
            "a node), or the plugin parameters="
        )
    if has_replicas and not replicas:
        raise ValueError(
            "parameters= is for one replica that is sharded over all ranks, got "
            f"dp_replicate_size={config.dp_replicate_size}; leave it out, or parameters="
        )
    if config is not None and config.tp_enabled:
        raise ValueError(
            "A CompressedFSDPPlugin does not work with tensor parallelism yet, got "
            f"tp_size={config.tp_size}; leave it at 1, or use compress_fsdp or Lightning's strategy"
        )
    require_unprepared(accelerator, plugin="CompressedFSDPPlugin")
