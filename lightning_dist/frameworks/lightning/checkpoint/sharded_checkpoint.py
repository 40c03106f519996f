"""Checkpoints of a module whose parameters are sharded: what goes into one, and comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_dist.checkpoint.snapshot.sharded_state import LazyState, load_lazily, without_shards
from lightning_dist.frameworks.lightning.checkpoint.resume import require_same_model
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.sync.base import Sync
from lightning_dist.sync.fsdp.checks import require_alike
from lightning_dist.sync.local.updates import LocalSync

_SHARDED = ("state_dict", "optimizer_states")


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
    sync: Sync | None,
) -> dict[str, Any]:
    """Load what module and optimizers have of the checkpoint at ``path``; returns all the rest.

    Each rank reads its parts of the sharded tensors, and of the state of the sync.

    Args:
        sync: of the strategy; states of other kinds are empty in what is returned.

    Raises:
        ValueError: it is of another model.
    """
    with load_lazily(path, weights_only=weights_only) as lazy:
        checkpoint: dict[str, Any] = lazy.state
        _load_module(checkpoint.pop("state_dict"), module, lazy, path)
        of_optimizers = checkpoint.pop("optimizer_states", [])
        for optimizer, state in zip(optimizers, of_optimizers, strict=False):
            optimizer.load_state_dict(_of_optimizer(state, optimizer, lazy))
        keys = {Sync.key, LocalSync.key} | ({sync.key} if sync is not None else set())
        states = {key: checkpoint.pop(key) for key in keys if key in checkpoint}
        whole: dict[str, Any] = lazy.whole(checkpoint)
        for key, state in states.items():
            whole[key] = {}
            if sync is not None and key == sync.key:
                is_one = isinstance(state, Mapping)
                whole[key] = sync.own_state(state, read=lazy.run) if is_one else lazy.whole(state)
        return whole


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
