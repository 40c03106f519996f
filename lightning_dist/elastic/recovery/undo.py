"""State that a step changes before it is applied, and its undoing where the step is given up."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.elastic import rng
from lightning_dist.elastic.private import version_of


class UndoError(RuntimeError):
    """An object was changed by a step that is given up, and its state before is not known."""


class _Kept(NamedTuple):
    """A tensor of a module, and a copy of its value."""

    owner: nn.Module
    name: str
    tensor: Tensor
    value: Tensor

    def put_back(self) -> None:
        self.tensor.copy_(self.value)
        if getattr(self.owner, self.name) is not self.tensor:  # another was put in its place
            setattr(self.owner, self.name, self.tensor)


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
        self._modules = {k: each for k, each in objects.items() if isinstance(each, nn.Module)}
        self._others = {k: each for k, each in objects.items() if k not in self._modules}
        self._copies: list[_Kept] | None = None
        self._changed = ""  # a module that was changed before it was copied

    def begin(self) -> None:
        """A step begins here."""
        self._copies = None
        self._put_generators_back = rng.hold()
        self._buffers = [_kept(*each) for each in _buffers_of(self._model)]
        self._states = {
            name: copy.deepcopy(other.state_dict()) for name, other in self._others.items()
        }
        self._settings = [
            [{k: _copied(v) for k, v in group.items() if k != "params"} for group in groups]
            for groups in (optimizer.param_groups for optimizer in self._optimizers)
        ]
        self._versions = [*self._versions_now()]

    def give_up(self) -> None:
        """What is changed from here on is not to stay."""
        if self._copies is None:
            self._changed = self._find_changed()
            self._copies = [_kept(*place[1:]) for place in self._places()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Put everything as it was at the begin.

        Raises:
            UndoError: a module was changed before :meth:`give_up`.
        """
        if changed := self._find_changed() if self._copies is None else self._changed:
            raise UndoError(
                f"state[{changed!r}] was changed in a step before optimizer.step(), and the step "
                "has failed; change it after optimizer.step() so that the step can be repeated"
            )
        for kept in (*(self._copies or ()), *self._buffers):
            kept.put_back()
        self._put_generators_back()
        for name, state in self._states.items():
            self._others[name].load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, value in settings.items():
                    if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                        group[key].copy_(value)  # schedulers write to it
                    else:
                        group[key] = value

    def _places(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Tensors of modules, by the name of the module; but the buffers of the model."""
        own = {id(tensor) for _, _, tensor in _buffers_of(self._model)}
        for name, module in self._modules.items():
            for owner, key, tensor in (*_parameters_of(module), *_buffers_of(module)):
                if id(tensor) not in own:
                    yield name, owner, key, tensor

    def _versions_now(self) -> Iterator[tuple[str, int, int]]:
        for name, _, _, tensor in self._places():
            yield name, id(tensor), version_of(tensor)

    def _find_changed(self) -> str:
        pairs = zip(self._versions, self._versions_now(), strict=False)
        return next((before[0] for before, now in pairs if before != now), "")


def _parameters_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name, tensor in owner.named_parameters(recurse=False):
            if not tensor.is_inference():  # nobody can change it
                yield owner, name, tensor


def _buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name, tensor in owner.named_buffers(recurse=False):
            if not tensor.is_inference():
                yield owner, name, tensor


def _kept(owner: nn.Module, name: str, tensor: Tensor) -> _Kept:
    return _Kept(owner, name, tensor, tensor.detach().clone())


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
