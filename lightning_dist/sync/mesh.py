"""Device mesh of a model that is held once, or in shards, on every node; for both frameworks."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist.base.log import get_logger
from lightning_dist.ranks import host_name
from lightning_dist.ranks.facts import all_facts
from lightning_dist.ranks.launcher import claim, contradiction
from lightning_dist.ranks.nodes import describe_counts, ranks_by
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.sharded import ShardedSettings
from lightning_dist.settings.signatures import refuse_unknown
from lightning_dist.sync.arguments import refuse_pytorch_lightning

log = get_logger(__name__)

DIMENSIONS = ("replicate", "data_parallel", "tensor_parallel")


class ReplicatedMesh:
    """Mixin before a ``ModelParallelStrategy`` of Lightning or Fabric.

    Its device mesh has the dimensions ``"replicate"``, ``"data_parallel"`` and
    ``"tensor_parallel"``. ``fully_shard`` is called with ``device_mesh["data_parallel"]``, as under
    ``ModelParallelStrategy``: these are the ranks of one replica.
    """

    if TYPE_CHECKING:

        @property
        def device_mesh(self) -> DeviceMesh: ...

        @property
        def root_device(self) -> torch.device: ...

    def __init__(
        self,
        settings: ExchangeSettings,
        *,
        replicate_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        """Check the sizes; nothing here may depend on rank or device.

        Args:
            settings: of the exchange between replicas, or of the collectives of one.
            replicate_size: replicas of the model. ``"auto"``: as many as nodes; with ``parameters``
                one.
            data_parallel_size: ranks that shard a replica. ``"auto"``: all that are left.
            tensor_parallel_size: ranks that have a part of each layer, within a shard.
            **kwargs: everything else that ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
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
        if isinstance(settings, ShardedSettings) and settings.parameters is not None:
            if replicate_size not in ("auto", 1) or tensor_parallel_size != 1:
                raise ValueError(
                    "parameters= is for one replica that is sharded over all ranks, got "
                    f"replicate_size={replicate_size} and "
                    f"tensor_parallel_size={tensor_parallel_size}; leave both out, or parameters="
                )
            replicate_size = 1
        self._settings = settings
        self._sizes = replicate_size, data_parallel_size, tensor_parallel_size
        super().__init__(**kwargs)

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
            ValueError: the sizes do not make up the world size, or nodes are no blocks of ranks.
        """
        world, (replicas, shards, tensor) = dist.get_world_size(), self._sizes
        nodes = _count_nodes(self.root_device) if replicas == "auto" else replicas
        left = max(1, world // (nodes * tensor))
        sizes = (nodes, left if shards == "auto" else shards, tensor)
        if prod(sizes) != world:
            raise ValueError(
                "replicate_size * data_parallel_size * tensor_parallel_size must be the world "
                f"size, got {' * '.join(map(str, sizes))} for {world} ranks; leave "
                "data_parallel_size at 'auto', or start another number of ranks"
            )
        return init_device_mesh(self.root_device.type, sizes, mesh_dim_names=DIMENSIONS)


def _count_nodes(device: torch.device) -> int:
    """Nodes of equally many ranks that follow each other. Collective.

    Raises:
        ValueError: they are not such.
    """
    world = dist.group.WORLD
    assert world is not None
    place = claim(rank=world.rank())
    fact = {"node": host_name(), "claim": None if place is None else place.as_fact()}
    facts = all_facts(fact, group=world, device=device)
    nodes = [each["node"] for each in facts]
    remedy = "give replicate_size=, the number of replicas"
    found = contradiction(nodes, [each["claim"] for each in facts])
    if found is not None and world.rank() == 0:
        log.warning("%s. Host names are used; %s", found, remedy)
    blocks = ranks_by(nodes)
    if len(set(map(len, blocks))) > 1 or [r for ranks in blocks for r in ranks] != [
        *range(len(nodes))
    ]:
        raise ValueError(
            "replicate_size='auto' needs nodes with equally many ranks, numbered node by node, got "
            f"{describe_counts([len(ranks) for ranks in blocks])}: {blocks}; {remedy}"
        )
    return len(blocks)
