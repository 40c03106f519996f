"""State of a training in local steps whose workers are several ranks, each with its shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.private import map_tensors
from lightning_dist.ranks.spread import Read, Spread, read_whole, run_of
from lightning_dist.sync.fsdp.checks import require_alike
from lightning_dist.sync.fsdp.replicas import local_of
from lightning_dist.sync.local.state import (
    WorkerStates,
    described,
    placed,
    start_of,
)


class ShardedWorkerStates(WorkerStates):
    """State of all workers, as of :class:`WorkerStates`, of a model that ``fully_shard`` shards.

    Parameters and states of optimizers are whole in it, so that any number of shards loads them.
    The ``"buffers"`` of a worker are a list, of those of each of its ranks.
    """

    @property
    def _place(self) -> tuple[int, int, int]:
        """Number of this rank's worker, of this rank among the worker's, and of these."""
        shards, network = self._updates.shards, self._updates.reducer.network
        if shards is None:
            return network.rank, 0, 1
        return shards.between.rank, shards.rank, shards.size

    @property
    @override
    def is_of_first(self) -> bool:
        """True if this rank belongs to the first worker."""
        return self._place[0] == 0

    @override
    def _own(self) -> dict[str, Any]:
        for optimizer in self._optimizers:
            require_alike(optimizer, remedy="use an optimizer such as AdamW")
        return super()._own()

    @override
    def state_dict(self) -> dict[str, Any] | None:
        updates = self._updates
        shared, own = updates.state_dict(), self._own()
        buffers = map_tensors(lambda each: each.detach().cpu(), own.pop("buffers"))
        own = map_tensors(self._whole, own)
        shards, between = updates.shards, updates.reducer.network
        of_ranks: list[Any] | None = [buffers]
        if shards is not None:
            of_ranks, between = shards.objects(buffers), shards.between
        if of_ranks is None:
            return None
        workers = [None] * between.world_size if between.rank == 0 else None
        own = {**own, "buffers": of_ranks}
        dist.gather_object(own, workers, group=between.data.group, group_dst=0)
        return None if shared is None else {"shared": shared, "workers": workers}

    def _whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor on the worker's first rank, nothing elsewhere. Collective in the worker.

        One that is not sharded is that of the first rank.
        """
        whole = tensor.detach()
        if isinstance(tensor, DTensor):
            whole = tensor.full_tensor()
        return whole.cpu() if self._place[1] == 0 else torch.empty(0)

    @override
    def spread_state_dict(self) -> tuple[dict[str, Any], list[Spread]]:
        network, (worker, place, _) = self._updates.reducer.network, self._place
        shared, spreads = self._updates.spread_state_dict()
        own = self._own()
        buffers = own.pop("buffers")
        of_this = ((worker, place), described({"own": own, "buffers": buffers}))
        ranks: list[Any] = [None] * network.world_size
        dist.all_gather_object(ranks, of_this, group=network.data.group)
        workers: list[Any] = []
        for (of_worker, number), found in sorted(ranks, key=lambda each: each[0]):
            if number == 0:
                held = own if of_worker == worker else None
                whole = placed(found["own"], held, spreads, alone=place == 0)
                workers.append({**whole, "buffers": []})
            is_own = (of_worker, number) == (worker, place)
            of_rank = placed(found["buffers"], buffers if is_own else None, spreads)
            workers[-1]["buffers"].append(of_rank)
        return {"shared": shared, "workers": workers}, spreads

    @override
    def own_state(self, state: Mapping[str, Any], *, read: Read = run_of) -> dict[str, Any]:
        """This rank's part of :meth:`state_dict`.

        Args:
            read: gives a part of a tensor of ``state``, which may be in a file.
        """
        worker, place, size = self._place
        workers = state["workers"]
        own = workers[worker % len(workers)]
        buffers = own["buffers"]
        of_ranks = [buffers] if isinstance(buffers, Mapping) else buffers
        found: dict[str, Any] = {
            "shared": self._updates.own_state(_for_ranks(state, size, read), read=read),
            "buffers": of_ranks[place % len(of_ranks)],
            "optimizer_states": [
                _of_optimizer(saved, optimizer, read)
                for optimizer, saved in zip(self._optimizers, own["optimizer_states"], strict=True)
            ],
            "scaler": own.get("scaler") or None,  # {} is of a disabled one
            "parameters": None,
        }
        if worker < len(workers):
            saved = own["parameters"]
            trained = self._updates.trained
            found["parameters"] = {n: _part(saved[n], trained[n], read) for n in saved}
        rest: dict[str, Any] = map_tensors(partial(read_whole, read=read), found)
        return rest


def _part(whole: Tensor, like: Tensor, read: Read) -> Tensor:
    """This rank's part of ``whole``, which is sharded as ``like``; raises ValueError if not."""
    if whole.shape != like.shape:
        raise ValueError(
            f"A parameter has the shape {tuple(like.shape)} and {tuple(whole.shape)} in the state; "
            "use the model that it was saved with"
        )
    local = local_of(like.detach())
    start = start_of(like) if isinstance(like, DTensor) else 0
    return read(whole, start, local.numel()).view(local.shape)


def _of_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, read: Read) -> dict[str, Any]:
    """State for ``optimizer`` with shards in the place of whole tensors."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))  # torch compares the groups

    def own(value: Any, parameter: nn.Parameter | None) -> Any:
        is_shard = isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim()
        if not is_shard or value.shape != parameter.shape:  # type: ignore[union-attr]
            return value
        found = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)  # type: ignore[arg-type]
        local_of(found).copy_(_part(value, parameter, read))  # type: ignore[arg-type]
        return found

    state = {
        number: {name: own(value, by_number.get(number)) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _for_ranks(state: Mapping[str, Any], size: int, read: Read) -> Mapping[str, Any]:
    """State shared by the workers, with sample counts for ``size`` ranks per worker."""
    shared, count = state["shared"], len(state["workers"])
    samples = map_tensors(partial(read_whole, read=read), shared["samples"])
    rows = samples["workers"]
    before = len(rows) // count
    if before != size:  # a worker's ranks follow each other
        of_workers = rows.view(count, before, -1).sum(1) / size
        usual = samples["usual"] * before / size
        samples = {"workers": of_workers.repeat_interleave(size, 0), "usual": usual}
    return {**shared, "samples": samples}
