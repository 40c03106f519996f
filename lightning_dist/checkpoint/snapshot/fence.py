"""Holds an optimizer step back until a snapshot of what it changes is complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist.checkpoint.disk.errors import CheckpointError

_CLOSURE_FIRST = ("torch.optim", "lightning_dist")
"""Packages whose optimizers call their closure before they change anything."""
_PATIENCE = 600.0
"""Seconds for a copy within this machine."""


class Fence:
    """Step pre-hooks of all optimizers, open while nothing is being copied.

    With Lightning's automatic optimization the forward and backward pass are a closure that the
    optimizer calls within its step. For torch's own optimizers the wait is put after that closure,
    so that copy and passes overlap; other optimizers may change parameters before they call it, and
    wait at once.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._handles: list[RemovableHandle] = []
        self._patience = _PATIENCE
        self.waited = 0.0
        """Seconds that steps were held back, in total."""

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Hold these optimizers, and no others."""
        self.unwatch()
        self._handles = [o.register_step_pre_hook(self._before_step) for o in optimizers]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """From now on steps wait."""
        self._open.clear()

    def open(self) -> None:
        """Let steps go on."""
        self._open.set()

    def wait(self) -> None:
        """Wait until it is open.

        Raises:
            CheckpointError: the copy is stuck.
        """
        if not self._open.is_set():
            began = time.perf_counter()
            is_open = self._open.wait(self._patience)
            self.waited += time.perf_counter() - began
            if not is_open:
                raise CheckpointError(
                    f"The copy of a checkpoint did not complete within {self._patience:g} s, and "
                    "an optimizer step would corrupt it; does a device hang, or has the writer "
                    "stopped?"
                )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._open.is_set():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is optimizer
        package = type(optimizer).__module__
        if not callable(closure) or not package.startswith(_CLOSURE_FIRST):
            self.wait()
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._after(closure)}
        return (args[0], self._after(closure), *args[2:]), kwargs

    def _after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_then_wait() -> Any:
            result = closure()
            self.wait()
            return result

        return closure_then_wait
