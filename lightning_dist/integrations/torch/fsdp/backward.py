"""End of the backward pass of a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_dist.private import at_end_of_backward, is_in_backward, tensors_in
from lightning_dist.reducer.observer import untraced

ZEROS_FOR_UNUSED = (
    "call model.set_reduce_scatter_unused_params(True) before training (torch 2.13 or newer)"
)
"""Remedy for parameters that a backward pass gives no gradient."""


class BackwardEnd:
    """Calls ``end`` once at the end of each outermost backward pass of a model.

    A callback runs at the end of the backward pass in which it is queued. With reentrant
    checkpointing that is one within another, so it is queued by hooks of the model's outputs, with
    which the outermost one begins. And it runs before those that are queued later, as by further
    roots of ``fully_shard``, which reduce gradients then, so it queues itself once more.

    A stage of a pipeline reduces gradients after the backward passes of all micro-batches. There
    is no callback then: the end is with the last gradients.

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
        self._hooks = [  # before those of FSDP, which gather parameters
            model.register_forward_pre_hook(untraced(self._before_forward), prepend=True),
            model.register_forward_hook(untraced(self._after_forward)),
        ]

    def begin(self) -> None:
        """A forward pass begins, and no backward pass is under way but one that was cut short."""
        if is_in_backward():  # as a checkpoint does that covers the model
            return
        if self._queued:
            self._queued = False
            self._cut_short()
            if self._is_after:
                raise RuntimeError(
                    "In a pipeline every parameter of a stage must get a gradient in each step, "
                    "and those of some got none: their replicas differ now. Freeze them, or "
                    f"{ZEROS_FOR_UNUSED}"
                )
        self._begin()

    def watch(self, outputs: Any) -> None:
        """Nested collections of tensors with which a backward pass may begin, such as a loss."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.queue())  # type: ignore[no-untyped-call]

    def queue(self) -> None:
        """A backward pass is under way, or gradients are reduced after some."""
        if not self._queued:
            self._queued, self._is_after = True, not is_in_backward()
            if not self._is_after:
                at_end_of_backward(lambda: at_end_of_backward(self._end))

    def all_reduced(self) -> None:
        """All gradients are reduced: the end, if that is after the backward passes."""
        if self._queued and self._is_after:
            self._end()

    def remove(self) -> None:
        """Watch the model no longer."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, *_: Any) -> None:
        self.begin()

    def _after_forward(self, model: nn.Module, given: Any, outputs: Any) -> None:
        self.watch(outputs)

    def _end(self) -> None:
        assert self._queued, "once in a backward pass"
        self._queued = False
        self._call()
