"""A plugin for every Accelerator of a process, without a change of its script."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import nn

from lightning_dist.frameworks.accelerate.attach import handler_of, is_wrapped_by
from lightning_dist.frameworks.accelerate.local_updates import LocalUpdatesPlugin
from lightning_dist.frameworks.accelerate.plugins import ShardedCompression

_ENTRIES = ("prepare", "prepare_model")


@contextmanager
def attached_everywhere(attach: Callable[[Accelerator], Any]) -> Iterator[list[Accelerator]]:
    """Within the body, ``attach`` every Accelerator just before it prepares its first model.

    Not when it is made: a script may still give it a plugin of its own, and transformers' Trainer
    replaces the handler of DDP at the last moment. Accelerate has no place where one could
    register; the two public methods of the class are wrapped, and restored at the end.

    Yields:
        The Accelerators so far; none were there if it stays empty.
    """
    seen: list[Accelerator] = []
    stock = {name: getattr(Accelerator, name) for name in _ENTRIES}

    def ensure(accelerator: Accelerator) -> bool:
        """Whether it was attached just now."""
        if any(accelerator is known for known in seen):
            return False
        if not hasattr(accelerator.state, "distributed_type"):
            return False  # it was reset, which Accelerate says itself
        seen.append(accelerator)
        has_own = is_wrapped_by(accelerator, ShardedCompression, LocalUpdatesPlugin)
        if has_own or handler_of(accelerator) is not None:
            return False  # the script's own plugin counts
        attach(accelerator)
        return True

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
            has_model = any(
                isinstance(argument, nn.Module) for argument in (*args, *kwargs.values())
            )
            if has_model and ensure(self):  # which may have put another in the place of this one
                return getattr(self, method.__name__)(*args, **kwargs)
            return method(self, *args, **kwargs)

        return prepare

    try:
        for name, method in stock.items():
            setattr(Accelerator, name, wrap(method))
        yield seen
    finally:
        for name, method in stock.items():
            setattr(Accelerator, name, method)
