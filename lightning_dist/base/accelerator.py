"""Streams and events of a device, as torch's module for it has them, and its memory.

The one place that asks torch for that module (``torch.cuda``, ``torch.xpu``, ``torch.npu``), so
that everything above works on any accelerator whose work is asynchronous.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A place in a stream."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


class DeviceStream(Protocol):
    """Work that an accelerator does in order, beside other streams."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class DeviceModule(Protocol):
    """The part of ``torch.cuda`` and similar modules that is used."""

    def Stream(self, device: torch.device, *, priority: int = 0) -> DeviceStream: ...

    def Event(self, *, enable_timing: bool) -> DeviceEvent: ...

    def current_stream(self, device: torch.device) -> DeviceStream: ...

    def stream(self, stream: DeviceStream) -> AbstractContextManager[None]: ...

    def synchronize(self, device: torch.device) -> None: ...


_NAMES = ("Stream", "Event", "current_stream", "stream", "synchronize")


def is_accelerator(device: torch.device) -> bool:
    """Whether work on ``device`` is asynchronous, so that the host runs ahead of it."""
    return device.type not in ("cpu", "meta")  # torch.cpu has streams too, which do nothing


def has_streams(device: torch.device) -> bool:
    """Whether ``device`` is an accelerator whose module has all that is used of it here."""
    module = getattr(torch, device.type, None)
    return is_accelerator(device) and all(hasattr(module, name) for name in _NAMES)


def device_module(device: torch.device) -> DeviceModule:
    """Torch's module for ``device``, an accelerator."""
    return cast(DeviceModule, torch.get_device_module(device))


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, which is on the host, on ``device``.

    An accelerator gets it in the order of its stream. From memory that is not pinned the host would
    wait until the stream has come to it, and be ahead no more.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
