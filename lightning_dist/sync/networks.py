"""Process groups and meshes of a sync: which ranks, in which levels, once all want the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import new_group, timeout_of
from lightning_dist.ranks import Topology, host_name
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.facts import all_facts, require_equal
from lightning_dist.ranks.launch import claim, contradiction
from lightning_dist.ranks.levels import (
    Nodes,
    Ranks,
    blocks_of,
    describe_counts,
    levels_of,
    ranks_by,
    require_cover,
    rows_of,
)
from lightning_dist.reducer.network import Network, NewGroup, in_levels
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import FSDP2, ExchangeSettings, MeshSettings, ShardedSettings
from lightning_dist.settings.local_updates import LocalUpdateSettings
from lightning_dist.sync.base import Groups
from lightning_dist.sync.buckets import finds_unused

log = get_logger(__name__)


def topology_of(
    settings: ExchangeSettings,
    *,
    nodes: Sequence[str],
    rank: int,
    claims: Sequence[Mapping[str, Any] | None] | None = None,
    needs_levels: bool = True,
) -> tuple[Topology, Nodes | None]:
    """The nodes of all ranks, as declared or as they say themselves, and the groups to reduce in.

    None instead of groups: the exchange is flat.

    Args:
        claims: of the launchers of all ranks; None: they are not compared with ``nodes``.
        needs_levels: False: flat too where a hierarchical exchange was asked for and there is one
            level only, since nodes or ranks are lost.

    Raises:
        ValueError: groups that do not cover all ranks once; a hierarchical exchange was asked for
            and there is one level only, or host names and launcher do not agree.
    """
    world_size = len(nodes)
    tree = _declared(settings, world_size=world_size)
    if tree is not None:  # declared groups count as nodes
        nodes = [f"group {number}" for number in rows_of(tree)]
    elif settings.hierarchical is not False and claims is not None:
        _check_claims(settings, nodes, claims, says=rank == 0)
    topology = Topology(tuple(nodes), rank)
    groups = tree or topology.by_node()
    levels = 1 < len(groups) < world_size
    if settings.hierarchical is False or not levels:
        if needs_levels:
            _require_flat(settings, topology)
        return topology, None
    return topology, groups


def view_of(settings: ExchangeSettings, *, world_size: int) -> str:
    """Settings of the groups on this rank, to be compared with those of the others."""
    try:
        tree = _declared(settings, world_size=world_size)
    except ValueError:  # raised again once it is known that all ranks have the same settings
        return f"ranks_per_node={settings.ranks_per_node}, rank_groups={settings.nodes}"
    if tree is None:
        return "by host name"
    setting = "ranks_per_node" if settings.nodes is None else "rank_groups"
    return f"{describe_counts([len(group) for group in tree])}: {tree} ({setting})"


def _declared(settings: ExchangeSettings, *, world_size: int) -> Nodes | None:
    if settings.nodes is not None:
        require_cover(settings.nodes, world_size=world_size)
        return settings.nodes
    if settings.ranks_per_node is not None:
        return blocks_of(settings.ranks_per_node, world_size=world_size)
    return None


def picture(settings: ExchangeSettings, tree: Nodes) -> str:
    """``2 nodes x 4 ranks, between nodes: int8 on 1/4 of the gradient per rank``."""
    parts = levels_of(tree, leader=settings.hierarchical == "leader")[0].owners
    text = describe_counts([len(group) for group in tree])
    if not settings.intra.lossless:
        text += f", inside: {settings.intra.name}"
    codec = " / ".join(dict.fromkeys(leaf.name for leaf in settings.inter.leaves()))
    share = f"1/{parts} of the gradient per rank" if parts > 1 else "the gradient, by one rank each"
    return f"{text}, between nodes: {codec} on {share}"


def _check_claims(
    settings: ExchangeSettings,
    nodes: Sequence[str],
    claims: Sequence[Mapping[str, Any] | None],
    *,
    says: bool,
) -> None:
    problem = contradiction(nodes, claims)
    if problem is None:
        return
    remedy = "name the groups with ranks_per_node= or rank_groups="
    if settings.hierarchical != "auto":
        raise ValueError(f"{problem}; {remedy}")
    if says:
        log.warning("%s. Host names are used; %s", problem, remedy)


def _require_flat(settings: ExchangeSettings, topology: Topology) -> None:
    """Raise where a setting needs several levels, and there is one."""
    if topology.world_size == 1:
        return  # nothing is sent
    counts = topology.describe()
    if settings.hierarchical not in (False, "auto"):
        raise ValueError(
            f"hierarchical={settings.hierarchical!r} needs several nodes, one of them with several "
            f"ranks, got {counts}; leave it at 'auto', or name the groups with ranks_per_node= or "
            "rank_groups="
        )
    if not settings.intra.lossless:
        raise ValueError(
            "A codec for each level needs several nodes, one of them with several ranks, got "
            f"{counts}; give one codec"
        )
    if settings.nodes is not None and settings.hierarchical is not False:
        raise ValueError(
            "rank_groups must be several groups, one of them with several ranks, got "
            f"{settings.nodes}"
        )


def new_groups(like: dist.ProcessGroup) -> Groups:
    """Two new groups over the ranks of ``like``: payloads and flags. Collective among them."""
    return [_new_group(like, range(like.size())) for _ in range(2)]


def network_for(
    model: DistributedDataParallel,
    settings: ExchangeSettings,
    *,
    parameters: str,
    continue_from: Reducer | None,
    groups: Groups | None,
) -> Network:
    """The groups of all ranks, once they are known to want the same. Collective."""
    # Every group costs threads and sockets, but ranks out of step must not meet in an old one.
    old = None
    if continue_from is not None and _on_all_ranks(continue_from.in_step, model):
        old = continue_from.network
        groups = old.data.group, old.control.group
    return network_over(
        model.process_group,
        settings,
        device=model.device,
        facts={"parameters": parameters, "find_unused_parameters": finds_unused(model)},
        groups=groups,
        made=old,
    )


def network_over(
    like: dist.ProcessGroup,
    settings: ExchangeSettings,
    *,
    device: torch.device,
    facts: Mapping[str, object],
    groups: Groups | None = None,
    made: Network | None = None,
    tree: Nodes | None = None,
) -> Network:
    """The groups of the ranks of ``like``, once they are known to want the same. Collective.

    Args:
        facts: what must be equal on all ranks, besides ``settings``.
        groups: see :func:`~lightning_dist.compress_ddp`; None makes them.
        made: a network of before, which is returned if the ranks agree.
        tree: groups of ranks to reduce in first; None: nodes, as the settings say.
    """
    if groups is not None and len(groups) < 2:
        raise ValueError(f"groups must be two process groups or more, got {len(groups)}")
    data, control, *levels = groups or new_groups(like)
    agreed = {
        **settings.fingerprint(),
        "groups": view_of(settings, world_size=data.size()),
        "process groups of levels": "given" if levels else "made here",
        **facts,
    }
    place = _place(dist.get_rank() if dist.is_initialized() else data.rank())
    gathered = all_facts({**agreed, **place}, group=data, device=device)
    require_equal([{key: fact[key] for key in agreed} for fact in gathered])
    nodes, claims = [fact["node"] for fact in gathered], [fact["claim"] for fact in gathered]
    if tree is None:
        topology, tree = topology_of(settings, nodes=nodes, claims=claims, rank=data.rank())
    else:
        topology, tree = Topology(tuple(nodes), data.rank()), tree if len(tree[0]) > 1 else None
    if made is not None:
        return made
    limit = WaitLimit(settings.exchange_timeout)
    flags = Channel(control, name="control", limit=limit)
    network = Network(Channel(data, limit=limit), flags, topology, device)
    if tree is None:
        if levels:
            raise ValueError(
                f"Groups of levels need a hierarchical exchange, got {len(levels)} of them and "
                f"{topology.describe()}; give two groups"
            )
        return _connected(network)
    leader = settings.hierarchical == "leader"
    new_group = _given(levels, topology.rank) if levels else _made(like, tree, leader=leader)
    return _connected(in_levels(network, tree, leader=leader, new_group=new_group))


def _place(rank: int) -> dict[str, Any]:
    """Node of this process, the global ``rank``, by its own name and by its launcher."""
    placement = claim(rank=rank)
    return {"node": host_name(), "claim": None if placement is None else placement.as_fact()}


def _connected(network: Network) -> Network:
    """``network``, whose groups have communicated once. Collective among the ranks of each.

    NCCL makes a communicator in the first collective of a group: in the middle of a backward pass,
    which would wait for it, and for ranks that are not there yet. With gloo each pair of ranks is
    connected by its two ends on their own: one that gives the group up at once, as after an error,
    would close what the other is still waiting for.
    """
    for channel in network.channels:
        channel.all_reduce(torch.zeros(1, device=network.device)).wait()
    return network


def node_group(like: dist.ProcessGroup, settings: ExchangeSettings, *, device: torch.device) -> Any:
    """A group of the ranks of this rank's node, or of its group of ranks. Collective.

    Raises:
        ValueError: there is one node, or no node has several ranks.
    """
    facts = all_facts({"node": host_name()}, group=like, device=device)
    nodes = [fact["node"] for fact in facts]
    topology, tree = topology_of(settings, nodes=nodes, rank=like.rank())
    if tree is None:
        raise ValueError(
            "replicas='node' needs several nodes, one of them with several ranks, got "
            f"{topology.describe()}; leave it at 'rank', or name the groups with ranks_per_node= "
            "or rank_groups="
        )
    groups = {tuple(ranks): _new_group(like, ranks) for ranks in tree}
    return next(group for ranks, group in groups.items() if topology.rank in ranks)


def _made(like: dist.ProcessGroup, tree: Nodes, *, leader: bool) -> NewGroup:
    """The groups of ``tree``, all of them made by all ranks of ``like`` in one order."""
    groups = groups_of(tree, leader=leader, make=partial(_new_group, like))
    if like.size() < dist.get_world_size():
        # torch names such a group by how many this process has made before: ranks that have made
        # fewer would never meet the others in the next one.
        levels = len(levels_of(tree, leader=leader))
        for _ in range(sum(like.rank() in ranks for ranks in groups), levels):
            _new_group(like, [like.rank()])
    return lambda ranks: groups[tuple(ranks)]


def groups_of(
    nodes: Nodes, *, leader: bool, make: Callable[[Sequence[int]], dist.ProcessGroup]
) -> dict[Ranks, dist.ProcessGroup]:
    """The groups of ``nodes`` by their ranks, all of them made by all ranks in one order."""
    levels = levels_of(nodes, leader=leader)
    wanted = dict.fromkeys(ranks for level in levels for ranks in level.groups)
    return {ranks: make(ranks) for ranks in wanted}


def _given(levels: Groups, rank: int) -> NewGroup:
    """The user's groups, from the inside out.

    Raises:
        ValueError: there are fewer than levels, or one is not of the ranks that it must be of.
    """
    ready = iter(levels)

    def next_group(ranks: Sequence[int]) -> dist.ProcessGroup:
        group = next(ready, None)
        place = None if group is None else (group.rank(), group.size())
        if group is None or place != (list(ranks).index(rank), len(ranks)):
            raise ValueError(
                f"groups must hold, after the two of all ranks, those of every level; rank {rank} "
                f"needs one of the ranks {list(ranks)} in this order (sort_ranks=False), got "
                f"{'none' if place is None else f'rank {place[0]} of {place[1]}'}; leave groups out"
            )
        return group

    return next_group


def _new_group(like: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of ``ranks`` of ``like``, with its timeout. Collective among all of ``like``."""
    of_world = dist.get_process_group_ranks(like)
    return new_group(
        [of_world[rank] for rank in ranks],  # a rank's number in it is its place in the list
        timeout=timeout_of(like),
        backend=dist.get_backend(like),
        # Ranks that are not in `like` do not come here.
        use_local_synchronization=like.size() < dist.get_world_size(),
    )


def _on_all_ranks(here: bool, model: DistributedDataParallel) -> bool:
    """Whether ``here`` holds on every rank. Collective over DDP's own group."""
    flag = torch.tensor([float(here)], device=model.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=model.process_group)
    return bool(flag.item())


def sharded_network(
    mesh: DeviceMesh,
    shard_dimension: int,
    settings: ExchangeSettings,
    *,
    parameters: str,
) -> Network:
    """The groups between the replicas of a model that is sharded over one dimension of ``mesh``.

    Collective among its ranks.
    """
    ranks = mesh.mesh if shard_dimension == 1 else mesh.mesh.T  # (replicas, shards)
    world = dist.group.WORLD
    assert world is not None
    if ranks.numel() < world.size():  # others are the rest of a mesh of more dimensions
        members, timeout = ranks.flatten().tolist(), timeout_of(world)
        world = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    order = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(world))}
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    tree = tuple(tuple(order[rank] for rank in row) for row in ranks.tolist())
    facts = {"mesh": str(ranks.tolist()), "parameters": parameters}
    return network_over(world, settings, device=device, facts=facts, tree=tree)


DIMENSIONS = ("replicate", "data_parallel", "tensor_parallel")
"""Dimensions of the mesh of a model that is held once, or in shards, on every node."""


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
    facts = all_facts(_place(world.rank()), group=world, device=device)
    nodes = [fact["node"] for fact in facts]
    remedy = "give replicate_size=, the number of replicas"
    problem = contradiction(nodes, [fact["claim"] for fact in facts])
    if problem is not None and world.rank() == 0:
        log.warning("%s. Host names are used; %s", problem, remedy)
    blocks = ranks_by(nodes)
    if len(set(map(len, blocks))) > 1 or [r for ranks in blocks for r in ranks] != [
        *range(len(nodes))
    ]:
        raise ValueError(
            "replicate_size='auto' needs nodes with equally many ranks, numbered node by node, got "
            f"{describe_counts([len(ranks) for ranks in blocks])}: {blocks}; {remedy}"
        )
    return len(blocks)
