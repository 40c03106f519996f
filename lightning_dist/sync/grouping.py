"""Groups of ranks: from the user, host names and the launcher, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dist.base.log import get_logger
from lightning_dist.ranks import Topology
from lightning_dist.ranks.launcher import contradiction
from lightning_dist.ranks.levels import Nodes, blocks_of, levels_of, require_cover, rows_of
from lightning_dist.ranks.nodes import describe_counts
from lightning_dist.settings.exchange import ExchangeSettings

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
    found = contradiction(nodes, claims)
    if found is None:
        return
    remedy = "name the groups with ranks_per_node= or rank_groups="
    if settings.hierarchical != "auto":
        raise ValueError(f"{found}; {remedy}")
    if says:
        log.warning("%s. Host names are used; %s", found, remedy)


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
