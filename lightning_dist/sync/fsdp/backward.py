"""End of the backward pass of a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.base.private import at_end_of_backward, is_in_backward, tensors_in
from lightning_dist.reducer.observer import untraced
from lightning_dist.sync.fsdp.private import after_reductions


class BackwardEnd:
    """Calls ``end`` once at the end of each outermost backward pass of a model.

    A callback runs at the end of the backward pass in which it is queued. With reentrant
    checkpointing that is one within another, so it is queued by hooks of the model's outputs, with
    which the outermost one begins. And it runs before those that are queued later, as by further
    roots of ``fully_shard``, which reduce gradients then, so it queues itself once more.

    A stage of a pipeline reduces gradients after the backward passes of all micro-batches, outside
    of them. The end is then that of the reductions of ``model``, which has to be the stage.

    Args:
        begin: called before each forward pass of the model.
        cut_short: called before that, if a backward pass has not ended.
    """

    def __init__(
        self,
        model: nn.Module,
        end: Callable[[], None],
        *,
        begin: Callable[[], None] = lambda: None,
        cut_short: Callable[[], None],
    ) -> None:
        self._call, self._begin, self._cut_short = end, begin, cut_short
        self._queued = self._is_after = False
        self._unwatch: Callable[[], None] | None = None
        if isinstance(model, FSDPModule):
            self._unwatch = after_reductions(model, self._all_reduced)
        self._hooks = [  # before those of FSDP, which gather parameters
            model.register_forward_pre_hook(untraced(self._before_forward), prepend=True),
            model.register_forward_hook(untraced(self._after_forward)),
        ]

    def begin(self) -> None:
        """A forward pass begins, and no backward pass is under way but one that was cut short.

        Raises:
            RuntimeError: the reductions of a stage have not ended.
        """
        if is_in_backward():  # as a checkpoint does that covers the model
            return
        if self._queued:
            self._queued = False
            self._cut_short()
            if self._is_after:
                raise RuntimeError(
                    "The gradients of the last step of this stage were not averaged: a forward "
                    "pass begins before the schedule has waited for their reduction. Restart from "
                    "a checkpoint if an optimizer has used them"
                )
        self._begin()

    def watch(self, outputs: Any) -> None:
        """Nested collections of tensors with which a backward pass may begin, such as a loss."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.queue())  # type: ignore[no-untyped-call]

    def queue(self) -> None:
        """A backward pass is under way, or gradients are reduced after some.

        Raises:
            RuntimeError: the latter, of a module that is no stage.
        """
        if not self._queued:
            is_after = not is_in_backward()
            if is_after and self._unwatch is None:
                raise RuntimeError(
                    "Gradients are reduced outside of a backward pass, as in a pipeline, and "
                    "fully_shard was not called on the module that compress_fsdp got; call both "
                    "for each stage"
                )
            self._queued, self._is_after = True, is_after
            if not is_after:
                at_end_of_backward(lambda: at_end_of_backward(self._end))

    def _all_reduced(self) -> None:
        if self._queued and self._is_after:
            self._end()

    def remove(self) -> None:
        """Watch the model no longer."""
        for hook in self._hooks:
            hook.remove()
        if self._unwatch is not None:
            self._unwatch()

    def _before_forward(self, *_: Any) -> None:
        self.begin()

    def _after_forward(self, model: nn.Module, given: Any, outputs: Any) -> None:
        self.watch(outputs)

    def _end(self) -> None:
        assert self._queued, "once in a backward pass"
        self._queued = False
        self._call()
