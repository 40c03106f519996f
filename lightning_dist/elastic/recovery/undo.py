"""State that a step changes before it is applied, and its undoing where the step is given up."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.base.private import copy_all
from lightning_dist.elastic import rng
from lightning_dist.elastic.private import version_of


class UndoError(RuntimeError):
    """An object was changed by a step that is given up, and its state before is not known."""


class _Place(NamedTuple):
    """A tensor of a module, by the name of the object that the module belongs to."""

    object: str
    owner: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        found: Tensor | None = getattr(self.owner, self.name, None)
        return found

    def put_back(self, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(value)
        if self.tensor is not tensor:  # another was put in its place
            setattr(self.owner, self.name, tensor)


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
        self._copies: list[tuple[_Place, Tensor, Tensor]] | None = None
        self._changed = ""  # a module that was changed before it was copied
        self._places = [place for place, _ in self._objects_tensors()]
        self._buffers: list[tuple[_Place, Tensor]] = []
        self._values: list[Tensor] = []

    def _objects_tensors(self) -> list[tuple[_Place, Tensor]]:
        """Parameters and buffers of the modules, without the buffers of the model.

        Finding them takes as long as a small step.
        """
        own = {id(tensor) for _, tensor in _buffers_of(self._model)}
        return [
            each
            for name, module in self._modules.items()
            for each in (*_parameters_of(module, name), *_buffers_of(module, name))
            if id(each[1]) not in own
        ]

    @torch.no_grad()
    def begin(self) -> None:
        """A step begins here."""
        self._copies = None
        self._put_generators_back = rng.hold()
        self._buffers = [*_buffers_of(self._model)]
        tensors = [tensor for _, tensor in self._buffers]
        if tensors and _are_alike(self._values, tensors):
            copy_all(self._values, tensors)
        else:
            self._values = [_copied(tensor) for tensor in tensors]
        self._states = {
            name: copy.deepcopy(other.state_dict()) for name, other in self._others.items()
        }
        self._settings = [
            [{k: _copied(v) for k, v in group.items() if k != "params"} for group in groups]
            for groups in (optimizer.param_groups for optimizer in self._optimizers)
        ]
        self._written = [
            (each, tensor) for each in self._places if (tensor := each.tensor) is not None
        ]
        self._versions = [version_of(tensor) for _, tensor in self._written]

    def give_up(self) -> None:
        """Changes from here on are undone by :meth:`put_back`, too: the step has failed."""
        if self._copies is None:
            self._changed = self._find_changed()
            found = self._objects_tensors()
            self._places = [place for place, _ in found]
            self._copies = [(place, tensor, _copied(tensor)) for place, tensor in found]

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
        for place, tensor, value in self._copies or ():
            place.put_back(tensor, value)
        for (place, tensor), value in zip(self._buffers, self._values, strict=True):
            place.put_back(tensor, value)
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

    def _find_changed(self) -> str:
        for (place, tensor), version in zip(self._written, self._versions, strict=True):
            if place.tensor is not tensor or version_of(tensor) != version:
                return place.object
        return ""


def _parameters_of(module: nn.Module, name: str) -> Iterator[tuple[_Place, Tensor]]:
    for owner in module.modules():
        for key, tensor in owner.named_parameters(recurse=False):
            if not tensor.is_inference():  # nobody can change it
                yield _Place(name, owner, key), tensor


def _buffers_of(module: nn.Module, name: str = "") -> Iterator[tuple[_Place, Tensor]]:
    for owner in module.modules():
        for key, tensor in owner.named_buffers(recurse=False):
            if not tensor.is_inference():
                yield _Place(name, owner, key), tensor


def _are_alike(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether shapes, dtypes and devices are equal, so that one can be copied to the other."""
    kinds = ([(each.shape, each.dtype, each.device) for each in of] for of in (values, tensors))
    return next(kinds) == next(kinds)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
