"""State that a step changes before it is applied, and its undoing where the step is given up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.elastic import rng
from lightning_dist.elastic.versions import TensorVersions


class UndoError(RuntimeError):
    """An object was changed by a step that is given up, and its state before is not known."""


class StepUndo:
    """State at the begin of a step: generators, buffers, and all objects that a loop saves.

    States of objects that are no modules, such as schedulers, are copied at the begin of each step.
    Those of modules may be large, and are copied only when a step is known to be given up.

    Args:
        model: whose parameters only optimizers change, and whose buffers each forward pass may.
        optimizers: of ``model``.
        objects: by name, what else a step may change; ``model`` may be among them.
    """

    def __init__(
        self, model: nn.Module, *, optimizers: Sequence[Optimizer], objects: Mapping[str, Any]
    ) -> None:
        self._model, self._optimizers = model, list(optimizers)
        modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
        self._others = {name: each for name, each in objects.items() if name not in modules}
        self._versions = TensorVersions(modules, apart=model.buffers())
        self._copies: list[tuple[Tensor, Tensor]] | None = None
        self._changed = ""  # a module that was changed before it was copied

    def begin(self) -> None:
        """A step begins here."""
        self._copies = None
        self._put_generators_back = rng.hold()
        self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        self._states = {
            name: copy.deepcopy(other.state_dict()) for name, other in self._others.items()
        }
        self._settings = [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        self._versions.mark()

    def give_up(self) -> None:
        """What is changed from here on is not to stay."""
        if self._copies is None:
            self._changed = self._versions.changed()
            self._copies = [(each, each.detach().clone()) for each in self._versions.tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Put everything as it was at the begin.

        Raises:
            UndoError: a module was changed before :meth:`give_up`.
        """
        copies = self._copies or []
        if changed := self._changed if copies else self._versions.changed():
            raise UndoError(
                f"state[{changed!r}] was changed in a step before optimizer.step(), and the step "
                "has failed; change it after optimizer.step() so that the step can be repeated"
            )
        for tensor, value in (*copies, *self._buffers):
            tensor.copy_(value)
        self._put_generators_back()
        for name, state in self._states.items():
            self._others[name].load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
