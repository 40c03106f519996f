"""Optimizers that step the parameters of a reducer: rules, and what is to be equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_dist.base.private import name_before_compile, names_ignored_by_ddp
from lightning_dist.reducer.observer import untraced
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.rules import (
    require_one_momentum,
    require_one_optimizer,
)

_Layout = tuple[int, ...]  # parameters of each group


class OptimizerWatch:
    """Checks each optimizer of a reducer's parameters before its first step, and with new groups.

    In plain DDP nothing else leads from a model to its optimizers. Their hyperparameters are
    compared between ranks by the reducer.
    """

    def __init__(self, reducer: Reducer, module: nn.Module) -> None:
        self._reducer, self._module = ref(reducer), ref(module)
        self._seen: WeakKeyDictionary[Optimizer, _Layout] = WeakKeyDictionary()
        self._own: WeakKeyDictionary[Optimizer, frozenset[Tensor]] = WeakKeyDictionary()
        hook = register_optimizer_step_pre_hook(untraced(self._before_step))
        reducer.at_close.append(hook.remove)
        reducer.hyperparameters = self.hyperparameters

    def hyperparameters(self) -> Mapping[str, str]:
        """Those of each optimizer that has stepped, by optimizer, group and name."""
        found = {}
        for optimizer in list(self._own):
            names = self._names_of(optimizer)
            kind = f"{type(optimizer).__name__} of {min(names)!r}"
            for number, group in enumerate(optimizer.param_groups):
                for key in sorted({"lr", *optimizer.defaults} & group.keys()):
                    value = group[key]
                    if isinstance(value, Tensor) and value.numel() == 1:
                        value = value.item()
                    if isinstance(value, bool | int | float | str | tuple | list | None):
                        found[f"{key} of {kind}, group {number}"] = repr(value)
        return found

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        reducer = self._reducer()
        return [] if reducer is None else [reducer.names[p] for p in self._own[optimizer]]

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        reducer, module = self._reducer(), self._module()
        if reducer is None or module is None or reducer.closed:
            return
        layout = tuple(len(group["params"]) for group in optimizer.param_groups)
        if self._seen.get(optimizer) != layout:
            self._check(optimizer, reducer, module)
            self._seen[optimizer] = layout

    def _check(self, optimizer: Optimizer, reducer: Reducer, module: nn.Module) -> None:
        every = {p for group in optimizer.param_groups for p in group["params"]}
        ignored, named = names_ignored_by_ddp(module), module.named_parameters()
        for name, parameter in named:
            if parameter in every and parameter not in reducer.names and name not in ignored:
                raise ValueError(
                    f"All parameters that are stepped must be in the model when it is wrapped, got "
                    f"{name_before_compile(name)!r}, whose gradient no rank sends: it was added "
                    "later; add it before, or wrap the model anew"
                )
        own = every & reducer.names.keys()
        if not own:
            return
        require_one_momentum(optimizer, reducer.settings, of=reducer.names)
        # One within another, such as ZeroRedundancyOptimizer's, has some of the same parameters.
        apart = [each for each, held in self._own.items() if held.isdisjoint(own)]
        require_one_optimizer(reducer.settings, 1 + len(apart))
        self._own[optimizer] = frozenset(own)
