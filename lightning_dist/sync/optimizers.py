"""Optimizers that step the parameters of a reducer: rules, and what is to be equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_dist.base.private import name_before_compile, names_ignored_by_ddp
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import untraced
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.rules import Case, check

_Layout = tuple[int, ...]  # parameters of each group


class _Owner(Protocol):
    """A reducer, or what has other collectives."""

    @property
    def names(self) -> Mapping[Tensor, str]: ...

    @property
    def settings(self) -> ExchangeSettings: ...

    @property
    def closed(self) -> bool: ...


def watch_optimizers(reducer: Reducer, module: nn.Module) -> None:
    """Check the optimizers of ``reducer``'s parameters, and let it compare what they are set to."""
    watch = OptimizerWatch(reducer, module)
    reducer.at_close.append(watch.close)
    reducer.hyperparameters = watch.hyperparameters


class OptimizerWatch:
    """Checks each optimizer of an owner's parameters before its first step, and with new groups.

    In plain DDP nothing else leads from a model to its optimizers. Their hyperparameters are
    compared between ranks by the reducer.
    """

    def __init__(self, owner: _Owner, module: nn.Module) -> None:
        self._owner, self._module = ref(owner), ref(module)
        self._seen: WeakKeyDictionary[Optimizer, _Layout] = WeakKeyDictionary()
        self._own: WeakKeyDictionary[Optimizer, frozenset[Tensor]] = WeakKeyDictionary()
        self.close = register_optimizer_step_pre_hook(untraced(self._before_step)).remove
        """Checks no more."""

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
        owner = self._owner()
        return [] if owner is None else [owner.names[p] for p in self._own[optimizer]]

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        owner, module = self._owner(), self._module()
        if owner is None or module is None or owner.closed:
            return
        layout = tuple(len(group["params"]) for group in optimizer.param_groups)
        if self._seen.get(optimizer) != layout:
            self._check(optimizer, owner, module)
            self._seen[optimizer] = layout

    def _check(self, optimizer: Optimizer, owner: _Owner, module: nn.Module) -> None:
        every = {p for group in optimizer.param_groups for p in group["params"]}
        ignored, named = names_ignored_by_ddp(module), module.named_parameters()
        for name, parameter in named:
            if parameter in every and parameter not in owner.names and name not in ignored:
                raise ValueError(
                    f"All parameters that are stepped must be in the model when it is wrapped, got "
                    f"{name_before_compile(name)!r}, whose gradient no rank sends: it was added "
                    "later; add it before, or wrap the model anew"
                )
        own = every & owner.names.keys()
        if not own:
            return
        # One within another, such as ZeroRedundancyOptimizer's, has some of the same parameters.
        apart = [each for each, held in self._own.items() if held.isdisjoint(own)]
        check(
            Case(owner.settings, module, [optimizer, *apart], parameters=owner.names),
            at="optimizers",
        )
        self._own[optimizer] = frozenset(own)
