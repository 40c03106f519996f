"""Parameters that a model in DDP trains, which may change from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.private import rebuild_ddp
from lightning_dist.reducer.observer import untraced
from lightning_dist.sync.rules import finds_unused


class TrainedSet:
    """Lets DDP average the parameters that require a gradient now, before each forward pass.

    DDP looks at them once, when it wraps a model: the gradient of a layer that was frozen then is
    never averaged, and one that is frozen later ends the training. All ranks freeze and unfreeze
    the same ones.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        names: Mapping[Tensor, str],
        *,
        note: Callable[[Iterable[Tensor]], None] | None = None,
    ) -> None:
        """Begin now; it ends when nothing holds this object or its :meth:`close`.

        Args:
            names: of all parameters.
            note: a method, called with those that are averaged from now on; not kept alive.
        """
        self._names, self._note = names, None if note is None else WeakMethod(note)
        self._averaged, self._flags = _trained(names), flags_of(names)
        self._hook = model.register_forward_pre_hook(untraced(self._before_forward))

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _before_forward(self, model: DistributedDataParallel, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        flags = flags_of(self._names)
        if flags == self._flags:
            return
        self._flags, trained = flags, _trained(self._names)
        added, frozen = trained - self._averaged, self._averaged - trained
        # One that is frozen for a while, as by toggle_optimizer, is an unused one to DDP.
        if trained and (added or (frozen and not finds_unused(model))):
            if model.static_graph:
                changed = next(iter(added or frozen))
                raise ValueError(
                    "static_graph=True says that the same parameters are used in all steps, and "
                    f"{self._names[changed]!r} was {'unfrozen' if added else 'frozen'}; "
                    "leave static_graph out"
                )
            self._averaged = trained
            if self._note is not None and (note := self._note()) is not None:
                note(added)
            rebuild_ddp(model, model.process_group)


def flags_of(parameters: Iterable[Tensor]) -> list[bool]:
    """``requires_grad`` of each, to see before every step whether one has changed."""
    return [each.requires_grad for each in parameters]


def _trained(parameters: Iterable[Tensor]) -> frozenset[Tensor]:
    return frozenset(each for each in parameters if each.requires_grad)
