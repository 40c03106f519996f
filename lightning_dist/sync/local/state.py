"""State of a training in local steps: what the workers share, and each one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_dist.base.private import map_tensors
from lightning_dist.ranks.facts import Read, Spread, gather_objects, read_whole, run_of
from lightning_dist.sync.fsdp.checks import require_alike
from lightning_dist.sync.fsdp.replicas import local_of
from lightning_dist.sync.local.anchor import first_row
from lightning_dist.sync.local.anchored import require_version
from lightning_dist.sync.local.outer_steps import LocalUpdates

NOT_SHARDED = (
    "format='sharded' needs the same state on all ranks, and with local steps every worker has its "
    "own optimizer state; use format='single'"
)


class WorkerStates:
    """State of all workers, for what saves one object for all ranks.

    A checkpoint of rank 0 alone would have the weights and moments of one worker. 12 bytes per
    parameter and worker with Adam. Of a model that ``fully_shard`` shards, parameters and states
    of optimizers are whole in it, so that any number of shards loads them; the ``"buffers"`` of a
    worker of several ranks are a list, of those of each of them.

    Args:
        updates: their outer steps.
        optimizers: of this worker, always in the same order.
        scaler: of this worker, which skips steps of its own.
    """

    def __init__(
        self,
        updates: LocalUpdates,
        optimizers: Sequence[Optimizer],
        *,
        scaler: GradScaler | None = None,
    ) -> None:
        self._updates, self._optimizers, self._scaler = updates, optimizers, scaler

    @property
    def _place(self) -> tuple[int, int, int]:
        """Number of this rank's worker, of this rank among the worker's, and of these."""
        shards, network = self._updates.shards, self._updates.reducer.network
        if shards is None:
            return network.rank, 0, 1
        return shards.between.rank, shards.rank, shards.size

    @property
    def is_of_first(self) -> bool:
        """True if this rank belongs to the first worker."""
        return self._place[0] == 0

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State of all workers on rank ``to``; None elsewhere. Collective, between optimizer steps.

        Every worker sends its own there.
        """
        updates, shards = self._updates, self._updates.shards
        assert shards is None or to == 0, "shards of a worker are put together on its first rank"
        shared, own = updates.state_dict(to=to), self._own()
        buffers = map_tensors(lambda tensor: tensor.detach().cpu(), updates.buffers())
        own = map_tensors(self._whole, own)
        between = updates.reducer.network
        if shards is not None:
            buffers, between = shards.objects(buffers), shards.between
            if buffers is None:
                return None
        own = {**own, "buffers": buffers}
        workers = gather_objects(own, between.state, device=between.device, to=to)
        return None if shared is None else {"shared": shared, "workers": workers}

    def _whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor on the worker's first rank, nothing elsewhere. Collective in the worker.

        One that is not sharded is that of the first rank.
        """
        whole = tensor.detach()
        if isinstance(tensor, DTensor):
            whole = tensor.full_tensor()
        return whole.cpu() if self._place[1] == 0 else torch.empty(0)

    def spread_state_dict(self) -> tuple[dict[str, Any], list[Spread]]:
        """:meth:`state_dict` on every rank, with the tensors of each worker left where they are.

        They are empty memory in the state; the spreads say which of them this rank has. Only their
        shapes and what is no tensor are communicated.
        """
        network, (worker, place, _) = self._updates.reducer.network, self._place
        shared, spreads = self._updates.spread_state_dict()
        own, buffers = self._own(), self._updates.buffers()
        of_this = ((worker, place), described({"own": own, "buffers": buffers}))
        of_ranks: list[Any] = [None] * network.world_size
        dist.all_gather_object(of_ranks, of_this, group=network.data.group)
        workers: list[Any] = []
        for (of_worker, number), about in sorted(of_ranks, key=lambda of_rank: of_rank[0]):
            if number == 0:
                held = own if of_worker == worker else None
                whole = placed(about["own"], held, spreads, alone=place == 0)
                workers.append({**whole, "buffers": []})
            is_own = (of_worker, number) == (worker, place)
            of_rank = placed(about["buffers"], buffers if is_own else None, spreads)
            workers[-1]["buffers"].append(of_rank)
        if self._updates.shards is None:
            workers = [{**of_worker, "buffers": of_worker["buffers"][0]} for of_worker in workers]
        return {"shared": shared, "workers": workers}, spreads

    def _own(self) -> dict[str, Any]:
        """State of this rank's worker, or its shards, but for the buffers."""
        for optimizer in self._optimizers:
            require_alike(optimizer, remedy="use an optimizer such as AdamW")
        own = {
            "parameters": self._updates.worker_weights(),
            "optimizer_states": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        return own if self._scaler is None else {**own, "scaler": self._scaler.state_dict()}

    def own_state(self, state: Mapping[str, Any], *, read: Read = run_of) -> dict[str, Any]:
        """Part of :meth:`state_dict` for this rank.

        Args:
            read: gives a part of a tensor of ``state``, which may be in a file.
        """
        require_version(state["shared"])
        worker, place, size = self._place
        workers = state["workers"]
        of_worker = workers[worker % len(workers)]
        buffers = of_worker["buffers"]
        of_ranks = [buffers] if isinstance(buffers, Mapping) else buffers
        pairs = zip(self._optimizers, of_worker["optimizer_states"], strict=True)
        part: dict[str, Any] = {
            "shared": self._updates.own_state(_for_ranks(state, size, read), read=read),
            "buffers": of_ranks[place % len(of_ranks)],
            "optimizer_states": [
                _of_optimizer(saved, optimizer, read) for optimizer, saved in pairs
            ],
            "scaler": of_worker.get("scaler") or None,  # {} is of a disabled one
            "parameters": None,
        }
        if worker < len(workers):
            saved = of_worker["parameters"]
            trained = self._updates.trained
            part["parameters"] = {name: _part(saved[name], trained[name], read) for name in saved}
        rest: dict[str, Any] = map_tensors(partial(read_whole, read=read), part)
        return rest

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`own_state`. Collective.

        With another number of workers those that were there go on where they were, whatever ranks
        they are now; those who join take the anchor, and moments of a worker of before. Those who
        leave take with them what they have not sent. All have the mean residual.

        Raises:
            ValueError: see :meth:`LocalUpdates.load_state_dict`.
        """
        for optimizer, saved in zip(self._optimizers, state["optimizer_states"], strict=True):
            optimizer.load_state_dict(laid_out(saved, optimizer))
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._updates.load_own_state(state["shared"])
        if state["parameters"] is not None:
            self._updates.load_worker(state["parameters"], state["buffers"])
        else:
            self._updates.start_from_anchor()


def laid_out(saved: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer whose tensors lie in memory as their parameters do.

    Fused kernels pair their elements by place; a saved one may lie by rows, whatever it was.
    """

    def as_in(held: Any, parameter: Tensor | None) -> Any:
        if not isinstance(held, Tensor) or parameter is None or isinstance(parameter, DTensor):
            return held
        if held.shape != parameter.shape:
            return held
        return torch.empty_like(parameter, dtype=held.dtype, device=held.device).copy_(held)

    return _changed(saved, optimizer, as_in)


def _changed(
    saved: Mapping[str, Any], optimizer: Optimizer, change: Callable[[Any, Tensor | None], Any]
) -> dict[str, Any]:
    """State of an optimizer with ``change(value, parameter)`` in the place of each value."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))  # torch compares the groups
    state = {
        number: {key: change(value, by_number.get(number)) for key, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def described(tree: Any) -> Any:
    """``tree`` with tensors that have only their shape and dtype."""
    return map_tensors(
        lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tree
    )


def placed(tree: Any, own: Any, spreads: list[Spread], *, alone: bool = True) -> Any:
    """Empty memory for what is ``described``, with what this rank has of it in ``spreads``.

    Args:
        own: what was described, on the rank that has it; None elsewhere.
        alone: what is not sharded is written by this rank.
    """
    tensors: list[Tensor] = []
    map_tensors(tensors.append, own)
    held = iter(tensors)

    def empty(like: Tensor) -> Tensor:
        whole = torch.empty(like.shape, dtype=like.dtype)
        spreads.append(Spread(whole, () if own is None else _runs(next(held), alone=alone)))
        return whole

    return map_tensors(empty, tree)


def _runs(tensor: Tensor, *, alone: bool) -> tuple[tuple[int, Tensor], ...]:
    """Elements of a whole tensor that this rank writes: its shard, or all if it is ``alone``."""
    local = local_of(tensor.detach()).reshape(-1)
    if isinstance(tensor, DTensor):
        return ((start_of(tensor), local),) if local.numel() else ()
    return ((0, local),) if alone else ()


def start_of(sharded: DTensor) -> int:
    """Element of a whole tensor at which this rank's part starts."""
    return first_row(sharded) * (sharded.numel() // max(1, sharded.shape[0]))


def _part(whole: Tensor, like: Tensor, read: Read) -> Tensor:
    """Part of ``whole`` for this rank, which is sharded as ``like``; raises ValueError if not."""
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

    def shard_of(value: Any, parameter: Tensor | None) -> Any:
        is_shard = isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim()
        if not is_shard or value.shape != parameter.shape:  # type: ignore[union-attr]
            return value
        shard = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)  # type: ignore[arg-type]
        local_of(shard).copy_(_part(value, parameter, read))  # type: ignore[arg-type]
        return shard

    return _changed(saved, optimizer, shard_of)


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
