"""Plugins of an Accelerator: CompressedDDPPlugin and CompressedFSDPPlugin."""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_dist.frameworks.accelerate import private
from lightning_dist.frameworks.accelerate.attach import (
    is_wrapped_by,
    print_outside,
    require_attachable,
    require_unprepared,
    wrap_method,
)
from lightning_dist.frameworks.accelerate.compression import Compression
from lightning_dist.settings import FromOutside, Resolved, from_outside
from lightning_dist.settings.exchange import ExchangeSettings, ShardedSettings
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.base import sync_of
from lightning_dist.sync.fsdp.replicas import kind_of


class CompressedDDPPlugin(FromOutside, ExchangeSettings):
    """Arguments of :func:`lightning_dist.compress_ddp`, for every model that Accelerate prepares.

    Attach it to an ``accelerate.Accelerator``, or give it to
    :class:`lightning_dist.accelerate.Accelerator` in ``kwargs_handlers=[...]``.

    What is left out comes from variables ``LIGHTNING_DIST_*``, the file that
    ``LIGHTNING_DIST_CONFIG`` names, or ``lightning_dist.yaml`` beside Accelerate's configuration,
    in this order; otherwise it is the default of ``compress_ddp``. The fields are what is in force;
    ``lightning-dist config --show`` says why.
    """

    @takes(ExchangeSettings, make=from_outside)
    def __init__(self, settings: Resolved) -> None:
        """Check the settings.

        Args:
            settings: each an argument of the plugin.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect, a
                variable or a key of a file that does not exist, or two sources that contradict each
                other; with where it is from.
        """
        super().__init__(settings)

    def attach(self, accelerator: Accelerator) -> Compression:
        """Compress the gradients of every model that ``accelerator`` prepares from now on.

        Their residuals, of every rank, go with ``accelerator.save_state`` and ``load_state``. With
        one process nothing is exchanged, which is warned of. Rank 0 says which settings are from
        outside of the code, and from where.

        Raises:
            ValueError: a model is prepared already, another plugin is attached, the Accelerator
                does not use DDP or was given a communication hook, or a launcher has started
                several processes and this Accelerator knows of one.
        """
        require_attachable(accelerator)
        compression = Compression(accelerator, self)
        print_outside(accelerator, self.resolved)
        return compression


_MESH = ("dp_replicate", "dp_shard_cp")
"""Dimensions of Accelerate's mesh: replicas, and the shards of one."""


class CompressedFSDPPlugin(FromOutside, ShardedSettings):
    """Arguments of :func:`lightning_dist.compress_fsdp`, for the model that Accelerate prepares.

    For an ``Accelerator`` with ``FullyShardedDataParallelPlugin(fsdp_version=2)`` and a
    ``ParallelismConfig`` of several replicas (HSDP): those are averaged by us, compressed; or, with
    ``parameters``, without replicas. What is left out comes from variables and files, as for
    :class:`CompressedDDPPlugin`.
    """

    @takes(ShardedSettings, make=from_outside)
    def __init__(self, settings: Resolved) -> None:
        """Check the settings.

        Args:
            settings: each an argument of the plugin.

        Raises:
            ValueError: a setting that is out of range or cannot take effect.
        """
        super().__init__(settings)

    def attach(self, accelerator: Accelerator) -> Compression:
        """Compress the gradients of the model that ``accelerator`` prepares from now on.

        In ``accelerator.accumulate`` and ``accelerator.no_sync`` nothing is sent between replicas,
        and gradients stay sharded. Residuals go with ``save_state`` and ``load_state``.

        Raises:
            ValueError: the Accelerator has not FSDP2 with several replicas, or with ``parameters``
                has several, or tensor parallelism; a model is prepared already, or a plugin
                attached.
        """
        _require_attachable(accelerator, replicas=self.parameters is None)
        compression = ShardedCompression(accelerator, self)
        print_outside(accelerator, self.resolved)
        return compression


class ShardedParallelism(ParallelismConfig):  # type: ignore[misc]  # it has no types
    """The user's configuration, of which FSDP gets only the dimension of the shards."""

    @property
    @override
    def fsdp_dim_names(self) -> list[str]:
        return [_MESH[1]]


class ShardedCompression(Compression):
    """The compression of one Accelerator; made by :meth:`CompressedFSDPPlugin.attach`."""

    def __init__(self, accelerator: Accelerator, settings: ShardedSettings) -> None:
        super().__init__(accelerator, settings, kind_of(settings))
        self._has_replicas = settings.parameters is None
        wrap_method(accelerator, "prepare", self._prepare)
        if self._has_replicas:
            config = copy(accelerator.parallelism_config)
            config.__class__ = ShardedParallelism
            accelerator.state.parallelism_config = config
            wrap_method(accelerator, "no_sync", self._no_sync)

    def take_place(self) -> None:
        """Nothing: FSDP2 asks nobody for a hook."""

    def _prepare(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        optimizers = [
            optimizer.optimizer for optimizer in private.prepared_optimizers(self._accelerator)
        ]
        for model in private.prepared_models(self._accelerator):
            if model not in self._attached:
                sync = self._attach(model, mesh=self._mesh())
                own = [optimizer for optimizer in optimizers if sync.trains(optimizer)]
                sync.connect(own, self._environment())
        return prepared

    def _mesh(self) -> DeviceMesh:
        accelerator = self._accelerator
        if self._has_replicas:
            mesh: DeviceMesh = accelerator.torch_device_mesh[_MESH]
            return mesh
        return init_device_mesh(accelerator.device.type, (accelerator.num_processes,))

    def _no_sync(self, no_sync: Any, model: nn.Module) -> AbstractContextManager[None]:
        sync = sync_of(model)
        context: AbstractContextManager[None] = sync.no_sync() if sync else no_sync(model)
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
