"""Local updates of a model that Accelerate has prepared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.integrations.accelerate.attach import kind_of
from lightning_dist.integrations.accelerate.private import prepared_models
from lightning_dist.integrations.torch.ddp import reducer_of
from lightning_dist.integrations.torch.local.outer_steps import LocalUpdates, OuterOptimizer
from lightning_dist.integrations.torch.local.state import WorkerStates
from lightning_dist.integrations.torch.local.updates import attach, checked

if TYPE_CHECKING:
    from accelerate import Accelerator


def local_updates(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *,
    outer_optimizer: OuterOptimizer | None = None,
    **settings: Any,
) -> LocalUpdates:
    """:func:`lightning_dist.local_updates` of what ``accelerator.prepare`` returned. Collective.

    The DistributedDataParallel around the model averages nothing from now on. ``save_state`` writes
    the anchor as the model's weights, and the state of all workers as one registered object, which
    ``load_state`` restores::

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        updates = lightning_dist.accelerate.local_updates(accelerator, model, optimizer)
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    updates.step()
        updates.finish()

    Args:
        model: prepared; one.
        optimizer: prepared, or several.
        outer_optimizer: as of :func:`lightning_dist.local_updates`.
        **settings: the others of the same.

    Raises:
        ValueError: the model is not in DDP, or has compressed gradients already; or see
            :func:`lightning_dist.local_updates`.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "Local updates need a model that accelerator.prepare has wrapped in "
            f"DistributedDataParallel, got {type(model).__name__} of an Accelerator with "
            f"{kind_of(accelerator)}; launch several processes with --multi_gpu (distributed_type: "
            "MULTI_GPU), and prepare the model first"
        )
    if reducer_of(model.module) is not None:
        raise ValueError(
            "The gradients of this model are compressed in every step by a CompressedDDPPlugin; "
            "leave the plugin out"
        )
    given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    optimizers = [getattr(each, "optimizer", each) for each in given]
    schedule, compression = checked(outer_optimizer=outer_optimizer, **settings)
    updates = attach(
        model,
        optimizers,
        schedule,
        compression,
        outer_optimizer=outer_optimizer,
        silences=True,
    )

    def save_anchor(models: Any, weights: list[Any], folder: str) -> None:
        for index, each in enumerate(prepared_models(accelerator)[: len(weights)]):
            if updates.is_of(each):
                weights[index] = updates.anchor_state_dict()

    accelerator.register_save_state_pre_hook(save_anchor)
    accelerator.register_for_checkpointing(WorkerStates(updates, optimizers))
    return updates
