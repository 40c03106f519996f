"""Learning rates that grow with the global batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_dist.private import LAST_LEARNING_RATES, inner_schedulers

_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULER = ("base_lrs", LAST_LEARNING_RATES, "base_lr", "max_lrs", "eta_min", "min_lrs")


def scale_learning_rates(
    optimizers: Iterable[Any], schedulers: Iterable[Any], *, factor: float
) -> None:
    """Multiply the learning rates, and what schedulers compute them from, with ``factor``.

    Schedulers keep theirs as numbers or lists under the names that torch's use; those inside a
    ``SequentialLR`` or ``ChainedScheduler`` too.
    """
    if factor == 1.0:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in _OF_GROUP:
                if group.get(name) is not None:
                    group[name] = group[name] * factor
    for scheduler in schedulers:
        _scale(scheduler, factor)


def _scale(scheduler: Any, factor: float) -> None:
    for name in _OF_SCHEDULER:
        value = getattr(scheduler, name, None)
        if isinstance(value, list):
            setattr(scheduler, name, [each * factor for each in value])
        elif isinstance(value, int | float):
            setattr(scheduler, name, value * factor)
    for inner in inner_schedulers(scheduler):
        _scale(inner, factor)
