"""Local updates of a model that Accelerate has prepared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.private import before_compile, rebuild_ddp
from lightning_dist.frameworks.accelerate.attach import (
    is_wrapped_by,
    kind_of,
    print_outside,
    wrap_method,
)
from lightning_dist.frameworks.accelerate.compression import RollCall
from lightning_dist.frameworks.accelerate.private import prepared_models, prepared_optimizers
from lightning_dist.settings import Resolved, from_outside
from lightning_dist.settings.local_updates import LocalUpdateSettings, Replicas
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.base import Environment, sync_of
from lightning_dist.sync.ddp import GradientSync
from lightning_dist.sync.local.anchor import require_replicas
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.updates import LocalSync
from lightning_dist.sync.networks import node_group
from lightning_dist.sync.rules import Case, check

if TYPE_CHECKING:
    from accelerate import Accelerator


@takes(LocalUpdateSettings, refuse=arguments_of(DistributedDataParallel), make=from_outside)
def local_updates(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    settings: Resolved,
    *,
    replicas: Replicas = "rank",
) -> LocalUpdates:
    """:func:`lightning_dist.local_updates` of what ``accelerator.prepare`` returned. Collective.

    The DistributedDataParallel around the model averages nothing from now on, with
    ``replicas="node"`` nothing between nodes. ``save_state`` writes the anchor as the model's
    weights, and the state of all workers as one registered object, which ``load_state`` restores::

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

    Settings that are left out come from variables ``LIGHTNING_DIST_*`` and the files of
    ``lightning-dist config``, as for :class:`CompressedDDPPlugin`; otherwise from the method.

    Args:
        model: prepared; one.
        optimizer: prepared, or several.
        settings: each an argument of this function.
        replicas: a worker is a rank, or all ranks of a node.

    Raises:
        ValueError: the model is not in DDP, or has compressed gradients already; or see
            :func:`lightning_dist.local_updates`.
    """
    _require_local(accelerator, model)
    if is_wrapped_by(accelerator, LocalUpdatesPlugin):
        raise ValueError(
            "The model is trained in local steps by a LocalUpdatesPlugin, which `lightning-dist "
            "config` may have set with method=; leave the call out, or the plugin"
        )
    print_outside(accelerator, settings)
    made = settings.make(LocalUpdateSettings)
    require_replicas(replicas, made)
    return _attach(accelerator, model, optimizer, made, replicas)


def _attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    settings: LocalUpdateSettings,
    replicas: Replicas,
) -> LocalUpdates:
    given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    optimizers = [getattr(prepared, "optimizer", prepared) for prepared in given]
    if replicas == "node":
        assert isinstance(model, DistributedDataParallel)
        rebuild_ddp(model, node_group(model.process_group, settings, device=model.device))
    environment = Environment(
        grad_scaler=accelerator.scaler, wraps=True, saves_shards=False, replicas=replicas
    )
    check(Case(settings, model, optimizers, environment), at="optimizers")
    sync = LocalSync.attach(model, settings, environment)
    sync.connect(optimizers, environment)
    network, roll_call = sync.reducer.network, None
    if network.world_size > 1:
        steps = partial(getattr, sync.reducer, "step")
        roll_call = RollCall(network.data.group, steps=steps, each="a worker")
        network.limit.waits_long = roll_call.waits

    def save_anchor(models: Any, weights: list[Any], folder: str) -> None:
        if roll_call is not None:
            roll_call.rendezvous("accelerator.save_state()")
        for index, each in enumerate(prepared_models(accelerator)[: len(weights)]):
            if sync_of(each) is sync:
                weights[index] = sync.weights_to_save(partial(weights.__getitem__, index))

    accelerator.register_save_state_pre_hook(save_anchor)
    accelerator.register_for_checkpointing(sync)
    return sync.updates


def _require_local(accelerator: Accelerator, model: nn.Module) -> None:
    if accelerator.distributed_type == "FSDP":
        raise ValueError(
            "Local updates do not work with Accelerate's FSDP yet, which has no checkpoint of "
            "several workers; call fully_shard over the ranks of a node and "
            "lightning_dist.local_updates in a loop of plain PyTorch, or compress gradients "
            "between nodes with CompressedFSDPPlugin"
        )
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "Local updates need a model that accelerator.prepare has wrapped in "
            f"DistributedDataParallel, got {type(model).__name__} of an Accelerator with "
            f"{kind_of(accelerator)}; launch several processes with --multi_gpu (distributed_type: "
            "MULTI_GPU), and prepare the model first"
        )
    if sync_of(model, GradientSync) is not None:
        raise ValueError(
            "The gradients of this model are compressed in every step by a CompressedDDPPlugin; "
            "leave the plugin out"
        )


class LocalUpdatesPlugin:
    """:func:`local_updates` of the model that Accelerate prepares, without a call in the loop.

    Every step of the first prepared optimizer that is not inside an accumulation counts. One model,
    with its optimizers. ``accelerator.get_state_dict`` and ``save_model`` give the anchor, and
    ``accelerator.end_training`` ends with the mean of all workers.
    """

    updates: LocalUpdates | None = None
    """The outer steps; None before ``prepare``."""

    @takes(LocalUpdateSettings, make=from_outside)
    def __init__(self, settings: Resolved, *, replicas: Replicas = "rank") -> None:
        """Check the settings.

        Args:
            settings: each an argument of the plugin; those that are left out come from variables
                and files, as for :class:`CompressedDDPPlugin`.
            replicas: a worker is a rank, or all ranks of a node.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        self._resolved, self._settings = settings, settings.make(LocalUpdateSettings)
        require_replicas(replicas, self._settings)
        if self._settings.weigh_by == "samples":
            raise ValueError(
                "weigh_by='samples' needs to know the samples of every step; call "
                "lightning_dist.accelerate.local_updates and updates.step(samples=) in the loop"
            )
        self._replicas: Replicas = replicas
        self._models: list[nn.Module] = []  # prepared

    def attach(self, accelerator: Accelerator) -> LocalUpdatesPlugin:
        """Train what ``accelerator`` prepares from now on in local steps.

        Raises:
            ValueError: a model is prepared already, or transformers' Trainer is there.
        """
        # It saves rank 0's weights and optimizer, and ends without end_training().
        if "transformers.trainer" in sys.modules:
            raise ValueError(
                "transformers' Trainer, which this script imports, cannot take local steps: it "
                "would save one worker only and not average them at the end; use "
                "CompressedDDPMixin and leave method= out of `lightning-dist config`, or train in "
                "a loop of Accelerate"
            )
        if prepared_models(accelerator):
            raise ValueError(
                "a LocalUpdatesPlugin must be attached before accelerator.prepare; attach it right "
                "after Accelerator(...)"
            )
        self._accelerator = accelerator
        wrap_method(accelerator, "prepare", self._prepare)
        wrap_method(accelerator, "get_state_dict", self._state_dict)
        wrap_method(accelerator, "end_training", self._end)
        return self

    def _prepare(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        optimizers = prepared_optimizers(self._accelerator)
        found = prepared if isinstance(prepared, tuple) else (prepared,)
        self._models += [before_compile(item) for item in found if isinstance(item, nn.Module)]
        trained = [
            candidate
            for candidate in self._models
            if isinstance(candidate, DistributedDataParallel)
        ]
        if len(trained) > 1:
            raise ValueError(
                "a LocalUpdatesPlugin trains one model, got a second one; call "
                "lightning_dist.accelerate.local_updates for each in the loop"
            )
        if self.updates is None and self._models and optimizers:
            model = (trained or self._models)[0]
            _require_local(self._accelerator, model)
            print_outside(self._accelerator, self._resolved)
            self.updates = _attach(
                self._accelerator, model, optimizers, self._settings, self._replicas
            )
            optimizers[0].step = self._counted(optimizers[0].step)
        return prepared

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            found = step(*args, **kwargs)
            if self._accelerator.sync_gradients and self.updates is not None:
                self.updates.step()
            return found

        return counted

    def _state_dict(self, stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.updates is not None and self.updates.is_of(model):
            return self.updates.anchor_state_dict()
        return stock(model, *args, **kwargs)

    def _end(self, stock: Callable[[], None]) -> None:
        if self.updates is not None:
            self.updates.finish()
            self.updates.close()
        stock()
