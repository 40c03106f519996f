"""Device mesh of a model that is held once, or in shards, on every node."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist.base.log import get_logger
from lightning_dist.ranks import host_name
from lightning_dist.ranks.facts import all_facts
from lightning_dist.ranks.launch import claim, contradiction
from lightning_dist.ranks.levels import describe_counts, ranks_by
from lightning_dist.settings.exchange import FSDP2, ExchangeSettings, MeshSettings, ShardedSettings
from lightning_dist.settings.local_updates import LocalUpdateSettings

log = get_logger(__name__)

DIMENSIONS = ("replicate", "data_parallel", "tensor_parallel")


def require_sizes(settings: ExchangeSettings, sizes: MeshSettings) -> None:
    """Raise ValueError unless a mesh of these sizes can be trained with ``settings``."""
    replicas, tensor = sizes.replicate_size, sizes.tensor_parallel_size
    if isinstance(settings, LocalUpdateSettings) and tensor != 1:
        raise ValueError(
            "Local updates need a model that is sharded over one dimension, got "
            f"tensor_parallel_size={tensor}; leave it out, or use CompressedModelParallelStrategy"
        )
    if _is_one_replica(settings) and (replicas not in ("auto", 1) or tensor != 1):
        raise ValueError(
            "parameters= is for one replica that is sharded over all ranks, got "
            f"replicate_size={replicas} and tensor_parallel_size={tensor}; leave both out, or "
            "parameters="
        )


def _is_one_replica(settings: ExchangeSettings) -> bool:
    return isinstance(settings, ShardedSettings) and settings.parameters is not None


def replicated_mesh(
    settings: ExchangeSettings, given: MeshSettings, *, device: torch.device
) -> DeviceMesh:
    """Mesh of all ranks with the dimensions :data:`DIMENSIONS`. Collective.

    Raises:
        ValueError: the sizes do not make up the world size, or nodes are no blocks of ranks.
    """
    world, replicas = dist.get_world_size(), given.replicate_size
    if _is_one_replica(settings):
        replicas = 1
    nodes = _count_nodes(device) if replicas == "auto" else replicas
    left = max(1, world // (nodes * given.tensor_parallel_size))
    shards = left if given.data_parallel_size == "auto" else given.data_parallel_size
    sizes = (nodes, shards, given.tensor_parallel_size)
    if prod(sizes) != world:
        raise ValueError(
            "replicate_size * data_parallel_size * tensor_parallel_size must be the world "
            f"size, got {' * '.join(map(str, sizes))} for {world} ranks; leave "
            "data_parallel_size at 'auto', or start another number of ranks"
        )
    averages = settings.kind == FSDP2 and not _is_one_replica(settings)
    if averages and nodes == 1 and dist.get_rank() == 0:
        log.warning(
            "One replica: nothing crosses between nodes and nothing is compressed, codec %s "
            "takes effect with two nodes or more, or with replicate_size=",
            settings.inter,
        )
    return init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)


def exchange_mesh(settings: ExchangeSettings, mesh: DeviceMesh) -> DeviceMesh | None:
    """Dimensions of ``mesh`` over which is exchanged; None: there is one replica."""
    if _is_one_replica(settings):
        return mesh[DIMENSIONS[1]]
    has_several = mesh[DIMENSIONS[0]].size() > 1 or settings.kind != FSDP2
    return mesh[DIMENSIONS[:2]] if has_several else None


def sampler_arguments(mesh: DeviceMesh) -> dict[str, int]:
    """Arguments of a sampler: data-parallel ranks of all replicas get data of their own."""
    replicate, data = (mesh[name] for name in DIMENSIONS[:2])
    return {
        "num_replicas": replicate.size() * data.size(),
        "rank": replicate.get_local_rank() * data.size() + data.get_local_rank(),
    }


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
