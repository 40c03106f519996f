"""A reducer in the groups of another generation, and copies of residuals.

Copies of residuals are on the next rank, for the loss of one. A model is still to get the mean of
the residuals over the ranks. When a rank is lost, the one that has its copy adds it to its own
residuals, and all ranks scale theirs to the new number of ranks, which keeps the mean of the old
ones. The same scaling holds where ranks join without residuals.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import names_ignored_by_ddp
from lightning_dist.elastic.recovery.generations import GenerationGroups
from lightning_dist.ranks import host_name
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.facts import all_facts
from lightning_dist.ranks.launch import Launch
from lightning_dist.reducer.network import Network, in_levels
from lightning_dist.reducer.plan.slices import as_real
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.state import Layout
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.run import RecoverySettings
from lightning_dist.sync.base import sync_of
from lightning_dist.sync.buckets import sparse_tables
from lightning_dist.sync.ddp import GradientSync, compile_kernels
from lightning_dist.sync.networks import groups_of, topology_of

log = get_logger(__name__)


def require_recoverable(model: DistributedDataParallel) -> Reducer:
    """The reducer of ``model``, if a step of it can be taken again when a rank is lost.

    Raises:
        ValueError: it cannot; says what to change.
    """
    sync = sync_of(model, GradientSync)
    if sync is None:
        raise ValueError(
            "recovery='in_process' needs the hook of compress_ddp, since DDP's own exchange raises "
            "in the backward pass; call compress_ddp(model, codec) before ElasticLoop "
            "(codec='none' compresses nothing)"
        )
    world = dict(each.split(":") for each in dist.get_backend_config().split(","))
    if model.device.type != "cpu" and world.get(model.device.type) in (None, "gloo"):
        raise ValueError(
            f"recovery='in_process' of a model on {model.device} needs a process group of a "
            f"backend for it, and the default one has {world}; create it with lightning_dist."
            f"init_process_group('cpu:gloo,{model.device.type}:...', recovery='in_process')"
        )
    if model.device.type != "cpu" and Launch.from_env().rank == 0:
        log.warning(
            "recovery='in_process' has not run on GPUs yet, but on a simulated device with the "
            "semantics of NCCL; compare with recovery='restart' before you rely on it"
        )
    require_passes(model)
    if tables := sparse_tables(model.module):
        raise ValueError(
            f"DDP itself averages the sparse gradient of {next(iter(tables))!r}, which fails if a "
            "rank is lost; make it with sparse=False, or use recovery='restart'"
        )
    if model.static_graph or model.find_unused_parameters:
        raise ValueError(
            "recovery='in_process' needs a DistributedDataParallel without static_graph and "
            "find_unused_parameters; leave them out, or use recovery='restart'"
        )
    require_no_names_of_ranks(sync.settings)
    return sync.reducer


def require_passes(model: nn.Module) -> None:
    """Raise ValueError for modules that need other ranks in a forward pass."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            "SyncBatchNorm exchanges in the forward pass, which fails if a rank is lost; use "
            "BatchNorm, or recovery='restart'"
        )


def require_no_names_of_ranks(settings: ExchangeSettings) -> None:
    """Raise ValueError for settings that name ranks."""
    if settings.ranks_per_node is not None or settings.nodes is not None:
        raise ValueError(
            "ranks_per_node and rank_groups name ranks, whose numbers change when one is lost; "
            "leave them out with recovery='in_process': ranks of one host name are reduced first, "
            "and LIGHTNING_DIST_HOSTNAME sets that name"
        )


def compile_ahead(reducer: Reducer, *, flat: bool) -> None:
    """Compile the kernels for the ranks that the launcher starts, while nobody waits for this one.

    With other numbers of ranks they are not compiled, and have the same bytes.

    Args:
        flat: as of :func:`regroup`.
    """
    settings, launch = reducer.settings, Launch.from_env()
    of_node = launch.local_world_size or launch.world_size
    topology, tree = topology_of(
        settings.flat() if flat else settings,
        nodes=[str(rank // of_node) for rank in range(launch.world_size)],
        rank=launch.rank,
        needs_levels=False,
    )
    network, group = replace(reducer.network, topology=topology), reducer.network.data.group
    if tree is not None:
        leader = settings.hierarchical == "leader"
        network = in_levels(network, tree, leader=leader, new_group=lambda ranks: group)
    trained = [as_real(parameter) for parameter in reducer.names if parameter.requires_grad]
    gradients = [(parameter.dtype, parameter.numel()) for parameter in trained]
    compile_kernels(reducer, gradients, says=launch.rank == 0, ahead=network)


def regroup(
    reducer: Reducer,
    groups: GenerationGroups,
    *,
    device: torch.device,
    data: dist.ProcessGroup,
    control: dist.ProcessGroup,
    limit: WaitLimit,
    begins: bool,
    flat: bool = False,
) -> None:
    """Let ``reducer`` go on in the groups of another generation. Collective.

    Args:
        limit: of all waits in these groups; given up when the generation is broken.
        groups: of the generation; those of nodes are made, where it reduces in them.
        device: of what is reduced.
        begins: the training begins, so there must be the nodes that the settings need.
        flat: leave out nodes.
    """
    settings, world = reducer.settings, dist.group.WORLD
    assert world is not None
    facts = {"node": host_name(), "levels": reducer.network.intra is not None}
    by_rank = all_facts(facts, group=control, device=device, limit=limit)
    topology, tree = topology_of(
        settings.flat() if flat else settings,
        nodes=[facts["node"] for facts in by_rank],
        rank=world.rank(),
        needs_levels=begins,
    )
    flags = Channel(control, name="control", limit=limit)
    network = Network(Channel(data, limit=limit), flags, topology, device)
    if tree is not None:
        leader = settings.hierarchical == "leader"
        groups_by_ranks = groups_of(
            tree, leader=leader, make=partial(groups.new, backend=groups.backend)
        )
        network = in_levels(
            network, tree, leader=leader, new_group=lambda ranks: groups_by_ranks[tuple(ranks)]
        )
    reducer.rebind(network, averages=any(facts["levels"] for facts in by_rank))


@torch.no_grad()
def send_buffers(model: DistributedDataParallel, channel: Channel) -> None:
    """Buffers of rank 0 -> all, as DDP does before a forward pass. Collective.

    One collective for each dtype. Nothing is changed if one fails.
    """
    ignored = names_ignored_by_ddp(model.module)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for name, buffer in model.module.named_buffers():
        if name not in ignored:
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    received = [torch.cat([each.reshape(-1) for each in buffers]) for buffers in alike.values()]
    for flat in received:
        channel.broadcast(flat, owner=0).wait()
    for buffers, flat in zip(alike.values(), received, strict=True):
        parts = torch.split(flat, [each.numel() for each in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def from_rank(state: Any, *, rank: int, to: Sequence[int] | None = None) -> Any:
    """``state`` of ``rank`` of the default group; whatever ``torch.save`` takes. Collective.

    Args:
        to: ranks that need it, others get None; None: all.
    """
    file, here = io.BytesIO(), dist.get_rank()
    if here == rank:
        torch.save(state, file)
    elif to is not None and here not in to:
        return None
    size = torch.tensor([file.tell()])
    _send(size, rank=rank, to=to)
    if here != rank:
        file.seek(int(size) - 1)
        file.write(b"\0")
    _send(torch.frombuffer(file.getbuffer(), dtype=torch.uint8), rank=rank, to=to)
    if here == rank:
        return state
    file.seek(0)
    return torch.load(file, weights_only=False, map_location="cpu")


def _send(tensor: Tensor, *, rank: int, to: Sequence[int] | None) -> None:
    if to is None:
        dist.broadcast(tensor, group_src=rank)
    elif dist.get_rank() != rank:
        dist.recv(tensor, group_src=rank)
    else:
        for receiver in to:
            dist.send(tensor, group_dst=receiver)


def require_flat(settings: ExchangeSettings) -> None:
    """Raise ValueError for settings that ask for a hierarchical exchange."""
    if settings.hierarchical not in (False, "auto") or not settings.intra.lossless:
        raise ValueError(
            "mirror_residuals copies the residual of each rank, and in a hierarchical exchange a "
            "rank has the residual of its share only; leave out mirror_residuals, or leave out "
            f"hierarchical={settings.hierarchical!r} and give one codec"
        )


def settings_to_recover(
    settings: ExchangeSettings, recovering: RecoverySettings
) -> ExchangeSettings:
    """Settings of an exchange that goes on without lost ranks.

    Raises:
        ValueError: it cannot.
    """
    if recovering.recovery == "in_process" and settings.delay:
        raise ValueError(
            "recovery='in_process' repeats a failed step, which is not possible with "
            f"delay={settings.delay}; leave it out, or use recovery='restart'"
        )
    if recovering.mirror_every is None:
        return settings
    require_flat(settings)
    return settings.flat()


def refuse_recovery(of: type, recovering: RecoverySettings) -> None:
    """Raise ValueError if a strategy that cannot recover in its process is asked to."""
    if recovering.recovery == "in_process":
        raise ValueError(
            f"{of.__name__} cannot continue in the same process after a rank is "
            "lost; use the Trainer's CompressedDDPStrategy, "
            "ElasticLoop(recovery='in_process'), or recovery='restart'"
        )


class ResidualMirror:
    """A copy of the residuals of the rank before this one, in a ring of all ranks.

    Ranks have names that stay when their numbers change. A refresh sends 4 bytes per compressed
    element, and all ranks wait for it; the copy takes as much memory, and as much again meanwhile.

    Args:
        every: steps between two refreshes.
    """

    def __init__(self, reducer: Reducer, *, every: int) -> None:
        self._reducer, self._every = reducer, every
        self._members: Sequence[str] = ()
        self._step: int | None = None  # of the last refresh
        self._owner = ""
        self._copy: tuple[Tensor, Layout] | None = None

    def refresh(self, group: dist.ProcessGroup) -> None:
        """Copy the residuals, if it is time. Collective, between steps.

        Args:
            group: of all members in their order, used for nothing else meanwhile.
        """
        step = self._reducer.step
        if len(self._members) < 2 or step == self._step or step % self._every:
            return
        limit, state = self._reducer.network.limit, self._reducer.state
        rank, size, residuals = group.rank(), group.size(), state.packed()
        # Ranks that were in other worlds before have residuals of other parameters.
        facts = {"layout": state.layout, "double": residuals.dtype == torch.float64}
        before = all_facts(facts, group=group, device=residuals.device, limit=limit)[rank - 1]
        numel = sum(of_one for *_, of_one in before["layout"])
        received = torch.empty(numel, dtype=torch.float64 if before["double"] else torch.float32)
        sizes, own_sizes = [0] * size, [0] * size
        sizes[rank - 1], own_sizes[(rank + 1) % size] = received.nbytes, residuals.nbytes
        channel = Channel(group, name="mirror", limit=limit)
        as_bytes = received.view(torch.uint8), residuals.view(torch.uint8)
        channel.all_to_all(*as_bytes, sizes, own_sizes).wait()
        self._copy = received, before["layout"]
        self._step = step
        self._owner = self._members[rank - 1]

    def regroup(self, members: Sequence[str]) -> str:
        """Go on among ``members``, all of whom call it; the lost rank whose residuals this one
        has taken over, or nothing.
        """
        before, self._members, self._step = self._members, tuple(members), None
        owner, self._owner = self._owner, ""
        copy, self._copy = self._copy, None
        if not before:  # a newcomer, which has no residuals
            return ""
        if taken := copy is not None and owner not in members:
            self._reducer.state.add(*copy)
        self._reducer.state.scale(len(members) / len(before))
        return owner if taken else ""
