"""The process groups of a reducer, made once all ranks are known to want the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.exchange.handshake import all_facts, require_equal
from lightning_dist.integrations.grouping import picture, topology_of, view_of
from lightning_dist.reducer.network import Network, in_levels
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings
from lightning_dist.topology import this_host
from lightning_dist.topology.groups import depth
from lightning_dist.topology.launcher import claim

log = logging.getLogger(__name__)

Groups = Sequence[dist.ProcessGroup]


def new_groups(like: dist.ProcessGroup, *, timeout: timedelta | None = None) -> Groups:
    """Two new groups over the ranks of ``like``: payloads and flags. Collective among them."""
    return [_new_group(like, range(like.size()), timeout=timeout) for _ in range(2)]


def network_for(
    model: DistributedDataParallel,
    settings: Settings,
    *,
    parameters: str,
    continue_from: Reducer | None,
    groups: Groups | None,
    timeout: timedelta | None,
) -> Network:
    """The groups of all ranks, once they are known to want the same. Collective."""
    # Every group costs threads and sockets, but ranks out of step must not meet in an old one.
    going_on = continue_from is not None and _on_all_ranks(continue_from.in_step, model)
    old = continue_from.network if going_on and continue_from is not None else None
    if old is not None:
        groups = old.data, old.control
    data, control, *levels = groups or new_groups(model.process_group, timeout=timeout)
    own = {
        **settings.fingerprint(),
        "groups": view_of(settings, world_size=data.size()),
        "parameters": parameters,
        "find_unused_parameters": finds_unused(model),
    }
    place = claim(rank=data.rank())
    place_of_own = {"host": this_host(), "claim": None if place is None else place.as_fact()}
    facts = all_facts({**own, **place_of_own}, group=data, device=model.device)
    require_equal([{key: fact[key] for key in own} for fact in facts])
    topology, tree = topology_of(
        settings,
        hosts=[fact["host"] for fact in facts],
        claims=[fact["claim"] for fact in facts],
        rank=data.rank(),
    )
    if old is not None:
        return old
    network = Network(data, control, topology, model.device)
    if tree is None:
        if topology.rank == 0:
            log.info("compressed DDP: %s, codec %s", topology.describe(), settings.codec)
        return network
    if topology.rank == 0:
        rank_zero_info(f"compressed DDP: {picture(settings, topology, tree)}")
    ready = iter(levels)
    made: list[dist.ProcessGroup] = []

    def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
        group = next(ready, None) or _new_group(model.process_group, ranks, timeout=timeout)
        made.append(group)
        return group

    leader = settings.hierarchical == "leader"
    network = in_levels(network, tree, leader=leader, new_group=new_group)
    while len(made) < depth(tree) and not levels:
        # torch names a group by how many this process has made before, so ranks that have fewer
        # would never meet the others in the next one.
        new_group([topology.rank])
    return network


def _new_group(
    like: dist.ProcessGroup, ranks: Sequence[int], *, timeout: timedelta | None
) -> dist.ProcessGroup:
    """A group of ``ranks`` of ``like``. Collective among them."""
    of_world = dist.get_process_group_ranks(like)
    group: dist.ProcessGroup = dist.new_group(
        [of_world[rank] for rank in ranks],
        timeout=timeout,
        backend=dist.get_backend(like),
        use_local_synchronization=True,
        sort_ranks=False,  # a rank's number in a group is its place in what we were told
    )
    return group


def finds_unused(model: DistributedDataParallel) -> bool:
    return model.find_unused_parameters and not model.static_graph


def _on_all_ranks(here: bool, model: DistributedDataParallel) -> bool:
    """Whether ``here`` holds on every rank. Collective over DDP's own group."""
    flag = torch.tensor([float(here)], device=model.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=model.process_group)
    return bool(flag.item())
