"""Checkpoints of a module whose parameters are sharded: what goes into one, and comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_dist.checkpoint.snapshot.shards import LazyState, load_lazily, without_shards
from lightning_dist.frameworks.lightning.checkpoint.resume import require_same_model
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.reducer.parts import Held
from lightning_dist.sync.fsdp.attach import ShardedExchange
from lightning_dist.sync.fsdp.checks import require_alike
from lightning_dist.sync.fsdp.replicas import ShardedGradients
from lightning_dist.sync.fsdp.shards import CompressedShards
from lightning_dist.sync.fsdp.tensor_parts import ROWS, TensorPart

_SHARDED = ("state_dict", "optimizer_states")
TakesOwnPart: TypeAlias = Callable[[Any, LazyState], Any]
"""Reads this rank's part of a value of a checkpoint."""


def leave_shards(
    checkpoint: dict[str, Any],
    io: CheckpointerIO,
    mesh: DeviceMesh,
    optimizers: Sequence[Optimizer],
) -> None:
    """Put whole tensors in the place of sharded ones, and let ``io`` know this rank's parts.

    Raises:
        ValueError: an optimizer keeps sharded state that is no part of what its parameter has.
    """
    for optimizer in optimizers:
        require_alike(optimizer, remedy="use an optimizer such as AdamW, or ModelCheckpoint")
    sharded = {key: checkpoint[key] for key in _SHARDED if key in checkpoint}
    whole, found = without_shards(sharded, mesh)
    checkpoint.update(whole)
    io.spreads += found


def load_shards(
    path: str,
    module: pl.LightningModule,
    optimizers: Sequence[Optimizer],
    *,
    weights_only: bool | None,
    own_parts: Mapping[str, TakesOwnPart],
) -> dict[str, Any]:
    """Load what module and optimizers have of the checkpoint at ``path``; returns all the rest.

    Each rank reads its parts of the sharded tensors, and of what a strategy has added.

    Args:
        own_parts: how this rank takes its part of what is under a key.

    Raises:
        ValueError: it is of another model.
    """
    with load_lazily(path, weights_only=weights_only) as lazy:
        checkpoint: dict[str, Any] = lazy.state
        _load_module(checkpoint.pop("state_dict"), module, lazy, path)
        states = checkpoint.pop("optimizer_states", [])
        for optimizer, state in zip(optimizers, states, strict=False):
            optimizer.load_state_dict(_of_optimizer(state, optimizer, lazy))
        added = {key: checkpoint.pop(key) for key in own_parts if key in checkpoint}
        whole: dict[str, Any] = lazy.whole(checkpoint)
        return whole | {key: own_parts[key](value, lazy) for key, value in added.items()}


def own_rows(value: Any, lazy: LazyState, *, exchange: ShardedExchange | None) -> Any:
    """The state of a reducer, with this rank's part of its replica's row or of the mean of all.

    Of errors of shards a rank takes whole rows, see :meth:`.CompressedShards.load_state_dict`.

    Args:
        exchange: what the residuals are for; None where there are none.
    """
    if not isinstance(value, dict):
        return lazy.whole(value)
    found: dict[str, Any] = {}
    for key, part in value.items():
        if key in ROWS:
            if isinstance(exchange, ShardedGradients):
                found[key] = {
                    name: _held(each, name, exchange, lazy) for name, each in part.items()
                }
        elif key == "errors":
            if isinstance(exchange, CompressedShards):
                ranks = exchange.group
                found["rows"] = rows = value["rows"][ranks.rank() :: ranks.size()]
                found[key] = {
                    name: [[_row(kind, row, lazy) for row in rows] for kind in each]
                    for name, each in part.items()
                }
        elif key != "rows":
            found[key] = lazy.whole(part)
    return found


def _row(saved: Tensor, row: int, lazy: LazyState) -> Tensor:
    numel = saved[0].numel()
    return lazy.run(saved, row * numel, numel).view(saved.shape[1:])


def _held(saved: Tensor, name: str, exchange: ShardedGradients, lazy: LazyState) -> Held:
    (count, whole), rows = saved.shape, exchange.reducer.network.rows
    part = exchange.tensor_parts.part(name, numel=whole)
    if part.whole != whole:  # of another model, which the reducer refuses
        part = TensorPart(1, whole, whole)
    start, numel = exchange.parts.get(name, (None, part.numel))  # all of it if it is frozen here
    taken = [rows.own] if count == rows.count else range(count)
    places = [*part.runs(start or 0, numel)] or [(0, 0, 0)]
    read = [
        torch.cat([lazy.run(saved, row * whole + at, length) for at, _, length in places])
        for row in taken
    ]
    return Held(part.numel, saved.dtype, loaded=sum(read[1:], read[0]) / len(read), start=start)


def _load_module(
    saved: dict[str, Any], module: pl.LightningModule, lazy: LazyState, path: str
) -> None:
    if module.strict_loading and not is_overridden("on_load_checkpoint", module):
        require_same_model(saved, module, path)
    own = module.state_dict()
    found = {name: _like(value, own.get(name), lazy) for name, value in saved.items()}
    module.load_state_dict(found, strict=module.strict_loading)


def _of_optimizer(saved: dict[str, Any], optimizer: Optimizer, lazy: LazyState) -> dict[str, Any]:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))  # torch compares the groups
    state = {
        number: {name: _like(value, by_number.get(number), lazy) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**lazy.whole({**saved, "state": {}}), "state": state}


def _like(value: Any, own: Any, lazy: LazyState) -> Any:
    """``value`` sharded as ``own`` is, or as it is."""
    if isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape:
        return lazy.part(value, own)
    return lazy.whole(value)
