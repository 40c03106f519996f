"""Makes a profile of a DistributedDataParallel, whoever trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_dist.profiling.capture.session import Session


class Watching:
    """Tells a session of the passes of ``model`` and of the steps of its optimizers.

    As long as it is kept.

    Args:
        model: whose forward passes in training begin a step.
    """

    def __init__(self, model: DistributedDataParallel, session: Session) -> None:
        self._model, self._session = model, session
        self._synchronises = True
        self._in_forward = self._in_backward = False
        self._mine = {id(parameter) for parameter in model.parameters()}
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_untraced(self._before_forward)),
            model.register_forward_hook(_untraced(self._after_forward)),
            register_optimizer_step_pre_hook(_untraced(self._before_step)),
            register_optimizer_step_post_hook(_untraced(self._after_step)),
        ]

    def stop(self) -> None:
        """Tell nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _trains(self) -> bool:
        # Lightning leaves DDP's own flag as a validation has set it.
        return self._model.module.training and torch.is_grad_enabled()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if self._trains:
            self._in_forward, self._in_backward = True, False
            self._session.forward()

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not self._trains:
            self._session.set_apart()
            return
        self._in_forward = False
        self._session.forward_ended()
        self._synchronises = self._model.require_backward_grad_sync
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._in_backward:  # a second output
            return
        self._in_backward = True
        self._session.backward()
        # After DDP's own, which waits for the means: it is queued while the pass runs.
        _at_the_end(lambda: _at_the_end(self._backward_ends))

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._session.backward_ended(synchronised=self._synchronises)

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._is_mine(optimizer):
            self._session.stepping()

    def _after_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._is_mine(optimizer):
            # Lightning's manual optimization; its backward pass is in there too.
            self._session.stepped(within_forward=self._in_forward)

    def _is_mine(self, optimizer: Optimizer) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(id(parameter) in self._mine for parameter in parameters)


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """torch.compile takes what hooks do into its graphs; a time that is looked at there is none."""
    weak = WeakMethod(hook)  # what the compiler makes of a function refers to itself

    def call(*arguments: Any) -> None:
        if (method := weak()) is not None:
            method(*arguments)

    return cast(Callable[..., None], torch.compiler.disable(call))  # type: ignore[no-untyped-call]


def _at_the_end(call: Callable[[], None]) -> None:
    """Of the backward pass that is under way."""
    Variable._execution_engine.queue_callback(call)
