"""Copies storages into a snapshot: at once, or while training goes on.

The path of accelerators is tested on a simulated one, and has not been run on a GPU yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dist.base.accelerator import DeviceStream, device_module, is_accelerator
from lightning_dist.checkpoint.private import version_of
from lightning_dist.checkpoint.snapshot.plan import Owned, Run

_SAMPLES = 8
_SAMPLE_BYTES = 64
_WORD = torch.int64
"""Copied as these where their number is whole: one by one, bytes take a sixth longer."""


def copy_now(runs: Iterable[Run], snapshot: Tensor) -> None:
    """Copy on the calling thread; returns when the bytes are there."""
    for run in runs:
        slot, content = _slot(run, snapshot), _content(run)
        if run.start % _WORD.itemsize == 0 and slot.nbytes % _WORD.itemsize == 0:
            slot, content = slot.view(_WORD), content.view(_WORD)
        slot.copy_(content)


@dataclass
class LaterCopy:
    """A copy that runs beside the training, of tensors that only an optimizer step changes.

    Made at the trigger. :meth:`run` copies, on another thread. Until it has returned the optimizers
    must not step (:mod:`.fence`).
    """

    runs: tuple[Run, ...]
    snapshot: Tensor
    owned: Owned
    _versions: Mapping[int, int] = field(init=False)
    _before: tuple[bytes, ...] = field(init=False)
    _streams: dict[torch.device, DeviceStream] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._versions = {address: version_of(tensor) for address, tensor in self.owned.items()}
        self._before = tuple(map(_samples_of, self.runs))
        for device in {run.storage.device for run in self.runs}:
            if is_accelerator(device):
                module = device_module(device)
                side = self._streams[device] = module.Stream(device)
                side.wait_stream(module.current_stream(device))

    def run(self) -> str:
        """Copy everything; returns what has been changed meanwhile, empty if nothing."""
        try:
            for run in self.runs:
                self._copy(run)
        finally:
            for stream in self._streams.values():
                stream.synchronize()
        return self._torn()

    def _copy(self, run: Run) -> None:
        device, slot = run.storage.device, _slot(run, self.snapshot)
        stream = self._streams.get(device)
        if stream is not None:
            with device_module(device).stream(stream):
                slot.copy_(_content(run), non_blocking=True)
        elif device.type == "cpu":
            # Not Tensor.copy_: its threads would take the training's cores.
            ctypes.memmove(slot.data_ptr(), run.storage.data_ptr() + run.start, slot.nbytes)
        else:
            slot.copy_(_content(run))

    def _torn(self) -> str:
        """Names a tensor that was changed outside an optimizer step while it was copied.

        In-place operations raise a tensor's version; changes through ``.data`` do not, so some
        bytes are compared too: those of the trigger, of the copy and of now.
        """
        base = self.snapshot.data_ptr()
        for run, before in zip(self.runs, self._before, strict=True):
            tensor = self.owned[run.storage.data_ptr()]
            changed = version_of(tensor) != self._versions[run.storage.data_ptr()]
            if before and not changed:
                copied = _samples(base + run.piece.offset, run.piece.nbytes)
                changed = not before == copied == _samples_of(run)
            if changed:
                return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        return ""


def _content(run: Run) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=run.storage.device).set_(run.storage)
    return whole[run.start : run.start + run.piece.nbytes]


def _slot(run: Run, snapshot: Tensor) -> Tensor:
    return snapshot[run.piece.offset : run.piece.offset + run.piece.nbytes]


def _samples_of(run: Run) -> bytes:
    """Empty on an accelerator, where reading them would wait for all that is queued."""
    if run.storage.device.type != "cpu":
        return b""
    return _samples(run.storage.data_ptr() + run.start, run.piece.nbytes)


def _samples(address: int, nbytes: int) -> bytes:
    """Bytes at some places of host memory; of short memory all."""
    # A third of the time of ctypes.string_at for each place.
    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    step = max(_SAMPLE_BYTES, nbytes // _SAMPLES)
    return b"".join(memory[at : at + _SAMPLE_BYTES] for at in range(0, nbytes, step))
