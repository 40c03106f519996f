"""Snapshots: bytes of a save, copied at once or while training goes on.

The path of accelerators is tested on a simulated one, and has not been run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist.base.accelerator import DeviceStream, device_module, is_accelerator
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Save
from lightning_dist.checkpoint.private import version_of
from lightning_dist.checkpoint.snapshot.plan import Owned, SnapshotPlan, StorageRange, owned_by
from lightning_dist.checkpoint.writer_queue import WriterQueue
from lightning_dist.settings.run import CheckpointSettings

_SAMPLES = 8
_SAMPLE_BYTES = 64
_WORD = torch.int64
"""Copied as these where their number is whole: one by one, bytes take a sixth longer."""


def copy_now(ranges: Iterable[StorageRange], snapshot: Tensor) -> None:
    """Copy on the calling thread; returns when the bytes are there."""
    for storage_range in ranges:
        slot, content = _slot(storage_range, snapshot), _content(storage_range)
        if storage_range.start % _WORD.itemsize == 0 and slot.nbytes % _WORD.itemsize == 0:
            slot, content = slot.view(_WORD), content.view(_WORD)
        slot.copy_(content)


@dataclass
class LaterCopy:
    """A copy that runs beside the training, of tensors that only an optimizer step changes.

    Made at the trigger. :meth:`run` copies, on another thread. Until it has returned the optimizers
    must not step (:class:`Fence`).
    """

    ranges: tuple[StorageRange, ...]
    snapshot: Tensor
    owned: Owned
    _versions: Mapping[int, int] = field(init=False)
    _before: tuple[bytes, ...] = field(init=False)
    _streams: dict[torch.device, DeviceStream] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._versions = {address: version_of(tensor) for address, tensor in self.owned.items()}
        self._before = tuple(map(_samples_of, self.ranges))
        for device in {storage_range.storage.device for storage_range in self.ranges}:
            if is_accelerator(device):
                module = device_module(device)
                side = self._streams[device] = module.Stream(device)
                side.wait_stream(module.current_stream(device))

    def run(self) -> str:
        """Copy everything; returns what has been changed meanwhile, empty if nothing."""
        try:
            for storage_range in self.ranges:
                self._copy(storage_range)
        finally:
            for stream in self._streams.values():
                stream.synchronize()
        return self._torn()

    def _copy(self, storage_range: StorageRange) -> None:
        device, slot = storage_range.storage.device, _slot(storage_range, self.snapshot)
        stream = self._streams.get(device)
        if stream is not None:
            with device_module(device).stream(stream):
                slot.copy_(_content(storage_range), non_blocking=True)
        elif device.type == "cpu":
            # Not Tensor.copy_: its threads would take the training's cores.
            ctypes.memmove(
                slot.data_ptr(), storage_range.storage.data_ptr() + storage_range.start, slot.nbytes
            )
        else:
            slot.copy_(_content(storage_range))

    def _torn(self) -> str:
        """Names a tensor that was changed outside an optimizer step while it was copied.

        In-place operations raise a tensor's version; changes through ``.data`` do not, so some
        bytes are compared too: those of the trigger, of the copy and of now.
        """
        base = self.snapshot.data_ptr()
        for storage_range, before in zip(self.ranges, self._before, strict=True):
            tensor = self.owned[storage_range.storage.data_ptr()]
            changed = version_of(tensor) != self._versions[storage_range.storage.data_ptr()]
            if before and not changed:
                copied = _samples(base + storage_range.target.offset, storage_range.target.nbytes)
                changed = not before == copied == _samples_of(storage_range)
            if changed:
                return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        return ""


def _content(storage_range: StorageRange) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage_range.storage.device).set_(
        storage_range.storage
    )
    return whole[storage_range.start : storage_range.start + storage_range.target.nbytes]


def _slot(storage_range: StorageRange, snapshot: Tensor) -> Tensor:
    return snapshot[
        storage_range.target.offset : storage_range.target.offset + storage_range.target.nbytes
    ]


def _samples_of(storage_range: StorageRange) -> bytes:
    """Empty on an accelerator, where reading them would wait for all that is queued."""
    if storage_range.storage.device.type != "cpu":
        return b""
    return _samples(
        storage_range.storage.data_ptr() + storage_range.start, storage_range.target.nbytes
    )


def _samples(address: int, nbytes: int) -> bytes:
    """Bytes at some places of host memory; of short memory all."""
    # A third of the time of ctypes.string_at for each place.
    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    step = max(_SAMPLE_BYTES, nbytes // _SAMPLES)
    return b"".join(memory[at : at + _SAMPLE_BYTES] for at in range(0, nbytes, step))


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


class Snapshots:
    """Snapshots for one queue, one after the other.

    What the watched optimizers own is copied later, until something else has changed it meanwhile.
    """

    def __init__(self, settings: CheckpointSettings, queue: WriterQueue) -> None:
        self.optimizers: list[Optimizer] = []
        self._settings, self._queue = settings, queue
        self.fence = Fence()
        """Steps wait for it while something is copied."""
        self._overlap = settings.snapshot in ("auto", "overlap")

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy what these optimizers own lazily, and hold their steps back until it is copied."""
        self.optimizers = list(optimizers)
        if self._overlap:
            self.fence.watch(self.optimizers)

    @property
    def overlap(self) -> bool:
        """Whether what the optimizers own is copied later."""
        return self._overlap and bool(self.optimizers)

    def owned(self) -> Owned:
        """Tensors that the optimizers own now."""
        return owned_by(self.optimizers)

    def take(self, save: Save, divided: SnapshotPlan, owned: Owned) -> None:
        """Take what the plan says and have it saved; the snapshot before must be complete.

        Raises:
            ValueError: it takes more than ``host_memory_limit``.
        """
        self._require_memory(divided)
        memory = self._queue.memory()
        snapshot = memory.reserve(divided.nbytes)
        for record_range, content in divided.constants:
            snapshot[record_range.offset : record_range.offset + record_range.nbytes] = _as_tensor(
                content
            )
        copy_now(divided.now, snapshot)
        if not divided.later:
            self._queue.send(save, memory)
            return
        later = LaterCopy(divided.later, snapshot, owned)
        self.fence.close()
        self._queue.send(save, memory, prepare=lambda: self._complete(later))

    def _complete(self, later: LaterCopy) -> str:
        try:
            changed = later.run()
        finally:
            self.fence.open()
        if not changed:
            return ""
        self._overlap = False  # from the next save on
        return (
            f"{changed} was changed outside an optimizer step while it was copied, so this "
            "checkpoint would mix two steps and was dropped; later ones are copied at once. Change "
            "parameters in the optimizer step only, or set snapshot='blocking'"
        )

    def _require_memory(self, divided: SnapshotPlan) -> None:
        limit, needed = self._settings.host_memory_limit, divided.nbytes
        needed *= self._settings.max_in_flight
        if limit is not None and needed > limit:
            raise ValueError(
                f"host_memory_limit={limit} bytes is less than the {needed} that snapshots of this "
                "state take; raise it, lower max_in_flight, or use format='sharded' on more ranks"
            )


def _as_tensor(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
