"""Base of both CompressedModelParallelStrategy: arguments, mesh, samplers, bytes and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from lightning_dist.codecs import Codec
from lightning_dist.configuration.options import OF_DDP, OF_LOCAL
from lightning_dist.exchange.handshake import all_facts
from lightning_dist.integrations.comm_report import CommReport, Reports
from lightning_dist.integrations.refusals import (
    refuse_codec_options,
    refuse_pytorch_lightning,
    refuse_unknown,
)
from lightning_dist.integrations.torch.checks import require_one_momentum
from lightning_dist.integrations.torch.fsdp.attach import (
    ShardedExchange,
    attach_replicas,
    attach_shards,
)
from lightning_dist.integrations.torch.fsdp.replicas import ShardedGradients
from lightning_dist.integrations.torch.fsdp.settings import ShardSettings, sharded_settings
from lightning_dist.integrations.torch.fsdp.shards import CompressedShards
from lightning_dist.integrations.torch.in_force import show
from lightning_dist.log import get_logger
from lightning_dist.onebit_adam import OneBitAdam
from lightning_dist.private import loss_scale_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.topology import this_host
from lightning_dist.topology.hosts import describe_counts, ranks_by
from lightning_dist.topology.launcher import claim, contradiction

log = get_logger(__name__)

DIMENSIONS = ("replicate", "data_parallel", "tensor_parallel")


class ModelParallelArguments(CommReport):
    """Mixin before a ``ModelParallelStrategy`` of Lightning or Fabric.

    Its device mesh has the dimensions ``"replicate"``, ``"data_parallel"`` and
    ``"tensor_parallel"``. ``fully_shard`` is called with ``device_mesh["data_parallel"]``, as under
    ``ModelParallelStrategy``: these are the ranks of one replica.
    """

    if TYPE_CHECKING:
        _timeout: timedelta | None

        @property
        def device_mesh(self) -> DeviceMesh: ...

        @property
        def root_device(self) -> torch.device: ...

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
            replicate_size: replicas of the model. ``"auto"``: one per host.
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
                f"got {', '.join(sorted(given))}; call fully_shard over the ranks of a node and "
                "lightning_dist.local_updates in a loop of plain PyTorch"
            )
        refuse_codec_options(kwargs, codec, of=type(self))
        if kwargs.get("recovery") == "in_process":
            raise ValueError(
                "recovery='in_process' needs the whole model on each rank, and here each keeps a "
                "part of it, which is lost with it; leave recovery out: ElasticRestart restarts "
                "all ranks from a checkpoint"
            )
        refuse_unknown(kwargs, of=type(self))
        refuse_pytorch_lightning(**kwargs)
        for name, size in (
            ("replicate_size", replicate_size),
            ("data_parallel_size", data_parallel_size),
            ("tensor_parallel_size", tensor_parallel_size),
        ):
            is_auto = size == "auto" and name != "tensor_parallel_size"
            if not (is_auto or (isinstance(size, int) and size > 0)):
                raise ValueError(f"{name} must be a number of ranks above 0, got {size!r}")
        self._replicas, self._shards, self._tensors = (
            replicate_size,
            data_parallel_size,
            tensor_parallel_size,
        )
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
            self._shard_settings = self._checked_shards(parameters)
        self._exchanges: list[ShardedExchange] = []  # of the models, in their order
        super().__init__(**kwargs)

    def _checked_shards(self, parameters: str | Codec) -> ShardSettings:
        if self._replicas == "auto":
            self._replicas = 1
        if self._replicas != 1 or self._tensors != 1:
            raise ValueError(
                "parameters= is for one replica that is sharded over all ranks, got "
                f"replicate_size={self._replicas} and tensor_parallel_size={self._tensors}; leave "
                "both out, or parameters="
            )
        return ShardSettings.check(self._settings, parameters)

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

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All data-parallel ranks, those of other replicas too, get data of their own."""
        replicate, data = (self.device_mesh[name] for name in DIMENSIONS[:2])
        return {
            "num_replicas": replicate.size() * data.size(),
            "rank": replicate.get_local_rank() * data.size() + data.get_local_rank(),
        }

    def _replicated_mesh(self) -> DeviceMesh:
        """The mesh of all ranks. Collective.

        Raises:
            ValueError: the sizes do not make up the world size, or hosts are no blocks of ranks.
        """
        world, tensor = dist.get_world_size(), self._tensors
        hosts = _count_hosts(self.root_device) if self._replicas == "auto" else self._replicas
        left = max(1, world // (hosts * tensor))
        sizes = (hosts, left if self._shards == "auto" else self._shards, tensor)
        if prod(sizes) != world:
            raise ValueError(
                "replicate_size * data_parallel_size * tensor_parallel_size must be the world "
                f"size, got {' * '.join(map(str, sizes))} for {world} ranks; leave "
                "data_parallel_size at 'auto', or start another number of ranks"
            )
        if hosts == 1 and dist.get_rank() == 0 and self._shard_settings is None:
            log.warning(
                "One replica: nothing crosses between hosts and nothing is compressed, codec %s "
                "takes effect with two hosts or more, or with replicate_size=",
                self._settings.codec,
            )
        return init_device_mesh(self.root_device.type, sizes, mesh_dim_names=DIMENSIONS)

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
            timeout=self._timeout,
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


def _count_hosts(device: torch.device) -> int:
    """Hosts of equally many ranks that follow each other. Collective.

    Raises:
        ValueError: they are not such.
    """
    world = dist.group.WORLD
    assert world is not None
    place = claim(rank=world.rank())
    fact = {"host": this_host(), "claim": None if place is None else place.as_fact()}
    facts = all_facts(fact, group=world, device=device)
    hosts = [each["host"] for each in facts]
    remedy = "give replicate_size=, the number of replicas"
    found = contradiction(hosts, [each["claim"] for each in facts])
    if found is not None and world.rank() == 0:
        log.warning("%s. The names of the hosts are used; %s", found, remedy)
    blocks = ranks_by(hosts)
    if len(set(map(len, blocks))) > 1 or [r for ranks in blocks for r in ranks] != [
        *range(len(hosts))
    ]:
        raise ValueError(
            "replicate_size='auto' needs hosts with equally many ranks, numbered host by host, got "
            f"{describe_counts([len(ranks) for ranks in blocks])}: {blocks}; {remedy}"
        )
    return len(blocks)
