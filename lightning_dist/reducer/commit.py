"""New state of a step that was not finite: committed for what an optimizer applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class PendingCommit:
    """New state of the finite parameters of such a step.

    A GradScaler skips the optimizers that have found an inf, a training loop may leave out the
    whole step, or replace what is not finite (``nan_to_num``) and go on. Who does what is known
    when optimizers step: the state of a parameter is committed when one applies its gradient.
    What none has applied by the next synchronised pass is dropped.

    Args:
        names: name of every parameter.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self._new: dict[str, list[Callable[[], object]]] = {}
        self._unhook: finalize[Any, Any] | None = None

    def add(self, name: str, held: Sequence[Tensor], *, then: Callable[[], None]) -> None:
        """What ``held`` holds now is the new state of ``name``; the caller then puts back the old.

        On the host: an accelerator may have no memory for another copy of all residuals. ``then``
        is called where that state is committed.
        """
        if self._unhook is None:
            handle = register_optimizer_step_post_hook(untraced(self._stepped))
            self._unhook = finalize(self, handle.remove)
        copies = [partial(tensor.copy_, tensor.to("cpu", copy=True)) for tensor in held]
        self._new[name] = [*copies, then]

    def drop(self) -> None:
        """Commit nothing of what was added so far."""
        self._new.clear()

    def close(self) -> None:
        """Drop everything, and watch optimizers no more."""
        self.drop()
        if self._unhook is not None:
            self._unhook()

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if not self._new:
            return
        # A fused optimizer is called in any case, and told by the GradScaler to leave the step out.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._names:
                    for commit in self._new.pop(self._names[parameter], ()):
                        commit()


def untraced(hook: Callable[..., None]) -> Any:
    """A method as a hook that torch.compile keeps out of its graphs, as long as its object lives.

    A time that is looked at in a graph is none.
    """
    weak = WeakMethod(hook)  # torch keeps a hook for the life of the process

    def call(*arguments: Any) -> None:
        if (method := weak()) is not None:
            method(*arguments)

    return torch.compiler.disable(call)  # type: ignore[no-untyped-call]
