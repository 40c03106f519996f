"""A step of a model in DDP that is taken again where a rank is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_dist.base.private import rebuild_ddp
from lightning_dist.elastic.private import order_buckets
from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.regroup import (
    ResidualMirror,
    compile_ahead,
    require_flat,
    require_recoverable,
    send_buffers,
)
from lightning_dist.elastic.recovery.undo import StepUndo, UndoError
from lightning_dist.elastic.recovery.worker import WorkerRecovery
from lightning_dist.ranks.channel import Channel
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import untraced
from lightning_dist.sync.onebit_adam import OneBitAdam


class StepRecovery(WorkerRecovery):
    """One worker of a training in DDP: it holds back steps that fail, and enters generations.

    Args:
        generations: of this worker.
        model: whose gradients are compressed.
        optimizers: of ``model``.
        objects: by name, what else a step may change, as of :class:`.StepUndo`.
        steps: optimizer steps so far.
        script: what the script says of the training; a newcomer must say the same.
        with_closures: optimizers are given closures, in which the caller sees that a step is given
            up; otherwise a hook leaves optimizers nothing to do.
        mirror_every: steps between two copies of residuals to the next rank; None: there are none.

    Raises:
        ValueError: something whose step cannot be taken again.
    """

    def __init__(
        self,
        generations: Generations,
        model: DistributedDataParallel,
        *,
        optimizers: Sequence[Optimizer],
        objects: Mapping[str, Any],
        steps: Callable[[], int],
        script: Mapping[str, Any],
        with_closures: bool = False,
        mirror_every: int | None = None,
    ) -> None:
        if any(isinstance(optimizer, OneBitAdam) for optimizer in optimizers):
            raise ValueError(
                "OneBitAdam exchanges in its step, which cannot be repeated; use another "
                "optimizer, or recovery='restart'"
            )
        self._model, self._optimizers = model, list(optimizers)
        reducer = require_recoverable(model)
        # It skips optimizers, so that no hook of theirs comes before it changes its scale.
        if reducer.has_grad_scaler and not any(
            isinstance(each, GradScaler) for each in objects.values()
        ):
            raise ValueError(
                "Repeating a step needs the scale that its GradScaler had at the start of the "
                "step, and new ranks need it too; give the GradScaler to ElasticLoop in state=, or "
                "train in bfloat16 without one"
            )
        super().__init__(
            generations,
            model.module,
            reducer,
            device=model.device,
            steps=steps,
            script=script,
            mirror=None if mirror_every is None else _mirror_of(reducer, every=mirror_every),
        )
        if reducer.settings.compile_kernels is True and reducer.network.world_size == 1:
            compile_ahead(reducer, flat=mirror_every is not None)
        self._buffers_are_sent = model.forward_sync_buffers
        model.forward_sync_buffers = False  # they are sent between steps, where that may fail
        self._hook = None
        if not with_closures:
            self._hook = register_optimizer_step_pre_hook(untraced(self._before_step))
        self._undo = StepUndo(model.module, optimizers=optimizers, objects=objects)
        self.begin_step()

    @override
    def begin_step(self) -> None:
        """Remember what a step changes before it is applied."""
        super().begin_step()
        self._begun = self.reducer.step
        self._undo.begin()

    @property
    def is_committed(self) -> bool:
        """Whether the mean of this step is here, on all ranks."""
        return self.reducer.step > self._begun

    @property
    @override
    def is_given_up(self) -> bool:
        return self.reducer.failure is not None and not self.is_committed

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if not any(optimizer is known for known in self._optimizers):
            return
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is not None:
            raise ValueError(
                "An optimizer that is given a closure computes gradients in its step, which "
                "recovery='in_process' cannot repeat; call backward before step(), or use "
                "recovery='restart'"
            )
        if not self.is_given_up:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._undo.give_up()

    def undo(self) -> None:
        """Put everything as it was when the step began: its exchange has failed."""
        for parameter in self._model.module.parameters():
            parameter.grad = None
        try:
            self._undo.put_back()
        except UndoError as error:
            self.generations.end(str(error), code=EXIT_RESTART)

    @property
    @override
    def must_repeat(self) -> bool:
        return self.is_broken

    @override
    def synchronize(self) -> None:
        """Do the collectives of DDP's next forward pass, which could fail there."""
        super().synchronize()
        order_buckets(self._model)
        world = dist.group.WORLD
        assert world is not None
        if self._buffers_are_sent:
            limit = self.reducer.network.limit
            send_buffers(self._model, Channel(world, name="buffers", limit=limit))
        if self._mirror is not None:
            self._mirror.refresh(world)

    @override
    def _regrouped(self) -> None:
        """DDP's own reducer is made anew on all ranks, as for a new model: newcomers have none
        whose buckets lie as those of the others.
        """
        world = dist.group.WORLD
        assert world is not None
        self._model.forward_sync_buffers = False  # they are sent between steps, where that may fail
        rebuild_ddp(self._model, world)

    @override
    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()


def _mirror_of(reducer: Reducer, *, every: int) -> ResidualMirror:
    if not reducer.keeps_state:
        raise ValueError(
            f"mirror_residuals has nothing to copy: codec {reducer.settings.inter} leaves no "
            "residuals; leave it out"
        )
    require_flat(reducer.settings)
    return ResidualMirror(reducer, every=every)
