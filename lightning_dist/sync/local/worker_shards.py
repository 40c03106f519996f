"""Workers whose ranks hold a model in shards, as ``fully_shard`` (FSDP2) has made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.ranks import host_name
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.facts import Read, Spread, all_facts, gather_objects
from lightning_dist.ranks.levels import Nodes
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ResidualParts, row_or_mean
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.fsdp.checks import require_all_sharded, sharded_groups
from lightning_dist.sync.fsdp.tensor_parts import ROWS
from lightning_dist.sync.local.anchor import Anchor


def workers_of(
    module: nn.Module, settings: ExchangeSettings, *, groups: object, device: torch.device
) -> Nodes | None:
    """Ranks of each worker of a sharded model; None where each rank has all of it. Collective.

    Raises:
        ValueError: a model that is not sharded as a whole over the ranks of a node, or settings
            that would group ranks in another way.
    """
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return None
    sharded = list(sharded_groups(module))
    require_all_sharded(module, sharded)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(
        parameter.device_mesh.ndim > 1 for parameter in trained if isinstance(parameter, DTensor)
    ):
        raise ValueError(
            "Local updates need a model that is sharded over one dimension, got one with tensor "
            "parallelism; leave parallelize_module out, or use lightning_dist.compress_fsdp"
        )
    given = {
        "groups": groups is not None,
        "ranks_per_node": settings.ranks_per_node is not None,
        "rank_groups": settings.nodes is not None,
        "hierarchical": settings.hierarchical != "auto",
        "a codec inside a node": not settings.intra.lossless,
    }
    if any(given.values()):
        raise ValueError(
            "The ranks of a worker are those of the mesh of fully_shard, where FSDP reduces "
            f"gradients itself, got {', '.join(n for n, is_given in given.items() if is_given)}; "
            "leave it out"
        )
    world = dist.group.WORLD
    assert world is not None
    ranks = {tuple(dist.get_process_group_ranks(group.group)) for group in sharded}
    facts = all_facts({"ranks": sorted(ranks), "node": host_name()}, group=world, device=device)
    if any(len(fact["ranks"]) > 1 for fact in facts):
        raise ValueError(
            f"All parameters must be sharded over the same ranks, got {facts[0]['ranks']}; call "
            "fully_shard with one mesh"
        )
    workers = tuple(dict.fromkeys(tuple(fact["ranks"][0]) for fact in facts))
    _require_workers_of_nodes(workers, [fact["node"] for fact in facts])
    return workers


def _require_workers_of_nodes(workers: Nodes, nodes: Sequence[str]) -> None:
    if len(workers) == 1:
        raise ValueError(
            "Local updates need several workers, got a model that is sharded over all "
            f"{len(nodes)} ranks; call fully_shard over the ranks of a node: mesh['shard'] of "
            "init_device_mesh(device, (nodes, ranks), mesh_dim_names=('replicate', 'shard'))"
        )
    if len({len(ranks) for ranks in workers}) > 1:
        raise ValueError(
            "Workers must have equally many ranks, so that shards are equal, got "
            f"{[len(ranks) for ranks in workers]}; shard over as many ranks of every node"
        )
    assert sorted(chain(*workers)) == list(range(len(nodes))), "a rank has one group of shards"
    places = [{nodes[rank] for rank in ranks} for ranks in workers]
    for index, hosts in enumerate(places):
        others = set[str]().union(*places[:index], *places[index + 1 :])
        if len(hosts) > 1 and hosts & others:
            raise ValueError(
                "A model must be sharded inside a node, where FSDP communicates in every step, got "
                f"the ranks {list(workers[index])} of the nodes {sorted(hosts)}, on which other "
                "workers have ranks too; call fully_shard with mesh['shard'], whose ranks are "
                "those of one node"
            )


class WorkerShards:
    """The shards of this rank's worker.

    Args:
        network: of all ranks, its nodes being the workers.
    """

    def __init__(self, network: Network) -> None:
        assert network.intra is not None
        assert network.intra.inter is not None, "every rank goes on with its shard"
        self.between = network.intra.inter
        """Network of the ranks that hold the same shard."""
        group = network.intra.data.group
        self._inside = Channel(group, name="control", limit=network.limit)
        self._device = network.device
        self.rank, self.size = group.rank(), group.size()

    def total(self, *own: float) -> list[float]:
        """Sums over the ranks of the worker. Collective among them."""
        totals = torch.tensor(own, dtype=torch.float64, device=self._device)
        self._inside.all_reduce(totals).wait()
        sums: list[float] = totals.tolist()
        return sums

    def objects(self, own: Any) -> list[Any] | None:
        """Objects of all ranks of the worker, on its first rank; None elsewhere. Collective."""
        return gather_objects(own, self._inside, device=self._device)


def spread_shards(
    state: Mapping[str, Any], anchor: Anchor, shards: WorkerShards, *, device: str = "cpu"
) -> tuple[dict[str, Any], list[Spread]]:
    """``state`` of outer steps with whole parameters on every rank, and shards left where they are.

    The workers have the same ones, and an equal share of them each in the spreads.
    """
    _require_shapes(state, anchor)
    spreads: list[Spread] = []
    share, shares = shards.between.rank, shards.between.world_size

    def runs(part: ParameterSlice, tensor: Tensor, *, before: int = 0) -> list[tuple[int, Tensor]]:
        low, high = tensor.numel() * share // shares, tensor.numel() * (share + 1) // shares
        return [(before + part.start + low, tensor.reshape(-1)[low:high])] if low < high else []

    def placed(tensor: Tensor, part: ParameterSlice) -> Tensor:
        rows = part.whole // max(1, prod(part.shape[1:]))
        whole = torch.empty((rows, *part.shape[1:]), dtype=tensor.dtype, device=device)
        spreads.append(Spread(whole, tuple(runs(part, tensor))))
        return whole

    changed = _changed(state, anchor, placed)
    exchange = state["exchange"]
    if exchange is not None:
        parts, before, mean = list[tuple[int, Tensor]](), 0, exchange["mean"]
        for part in anchor.fragment_of(exchange["names"]).slices:
            parts += runs(part, part.of(mean), before=before)
            before += part.whole
        exchange = {**exchange, "mean": torch.empty(before, dtype=mean.dtype, device=device)}
        spreads.append(Spread(exchange["mean"], tuple(parts)))
    return {**state, **changed, "exchange": exchange}, spreads


def own_shards(
    state: Mapping[str, Any], anchor: Anchor, *, network: Network, read: Read
) -> dict[str, Any]:
    """Part for this rank of a state of outer steps with whole parameters.

    Args:
        network: of the reducer, with the rows of residuals.
        read: gives a part of a tensor that may be in a file.
    """
    taken = partial(_part_of, read=read)
    changed = _changed(state, anchor, taken)
    exchange = state["exchange"]
    if exchange is not None:
        parts = anchor.fragment_of(exchange["names"]).slices
        wholes = exchange["mean"].split([part.whole for part in parts])
        means = [taken(whole, part).reshape(-1) for whole, part in zip(wholes, parts, strict=True)]
        exchange = {**exchange, "mean": torch.cat(means)}
    by_name = _parts(anchor)
    residuals = {
        key: {
            name: _held(tensor, by_name.get(name), network, read) for name, tensor in value.items()
        }
        if key in ROWS
        else value
        for key, value in state["residuals"].items()
    }
    return {**state, **changed, "exchange": exchange, "residuals": residuals}


def _parts(anchor: Anchor) -> dict[str, ParameterSlice]:
    """Parts of parameters that this rank has, by name."""
    return {part.name: part for fragment in anchor.fragments for part in fragment.slices}


def _anchors(anchor: Anchor) -> list[Tensor]:
    """Anchors in the order of the numbers in the optimizer's state."""
    return [tensor for group in anchor.optimizer.param_groups for tensor in group["params"]]


def _changed(
    state: Mapping[str, Any],
    anchor: Anchor,
    change: Callable[[Tensor, ParameterSlice], Tensor],
) -> dict[str, Any]:
    """Anchor and optimizer's state, with ``change(held, part)`` for what is held of a part."""
    by_name, saved = _parts(anchor), state["outer_optimizer"]
    anchors = {name: change(held, by_name[name]) for name, held in state["anchor"].items()}
    parts: dict[Tensor, ParameterSlice] = {}
    for fragment in anchor.fragments:
        parts.update(zip(fragment.anchors, fragment.slices, strict=True))
    of_anchors = {
        index: {
            key: change(held, parts[tensor]) if isinstance(held, Tensor) and held.dim() else held
            for key, held in saved["state"][index].items()
        }
        for index, tensor in enumerate(_anchors(anchor))
        if index in saved["state"]
    }
    return {"anchor": anchors, "outer_optimizer": {**saved, "state": of_anchors}}


def _require_shapes(state: Mapping[str, Any], anchor: Anchor) -> None:
    """Raise ValueError unless the optimizer keeps what can be put together of shards."""
    for index, tensor in enumerate(_anchors(anchor)):
        for key, held in state["outer_optimizer"]["state"].get(index, {}).items():
            if isinstance(held, Tensor) and held.dim() and held.shape != tensor.shape:
                raise ValueError(
                    "State of the outer optimizer must have the shape of its parameter to be "
                    f"put together from shards, got {key!r} of "
                    f"{type(anchor.optimizer).__name__}; use SGD or AdamW"
                )


def _held(
    saved: Tensor, part: ParameterSlice | None, network: Network, read: Read
) -> Tensor | ResidualParts:
    """Part for this rank of a residual's row that is in a file, or of the mean of all rows."""
    count, whole = saved.shape
    if not saved.is_meta or part is None or part.whole != whole:  # the last is refused later
        return saved
    start, numel = part.start, part.numel
    loaded = row_or_mean(count, network, lambda row: read(saved, row * whole + start, numel))
    return ResidualParts(whole, saved.dtype, loaded=loaded, start=start)


def _part_of(whole: Tensor, part: ParameterSlice, *, read: Read) -> Tensor:
    if whole.numel() != part.whole:
        raise ValueError(
            f"The state of {part.name!r} has {whole.numel()} elements, the parameter {part.whole}; "
            "use the model that it was saved with"
        )
    return read(whole, part.start, part.numel).view(part.shape)
