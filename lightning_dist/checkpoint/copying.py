"""Copies storages into a snapshot: at once, or while training goes on.

The CUDA path is written after PyTorch's documented stream rules and has not been run on a GPU yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dist.checkpoint.plan import Owned, Run

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
    _first_bytes: tuple[bytes, ...] = field(init=False)
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._versions = {address: tensor._version for address, tensor in self.owned.items()}
        self._first_bytes = tuple(map(_first_bytes, self.runs))
        for device in {
            run.storage.device for run in self.runs if run.storage.device.type == "cuda"
        }:
            side = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))

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
        stream = self._streams.get(run.storage.device)
        slot = _slot(run, self.snapshot)
        if stream is not None:
            with torch.cuda.stream(stream):
                slot.copy_(_content(run), non_blocking=True)
        elif run.storage.device.type == "cpu":
            # Not Tensor.copy_: its threads would take the training's cores.
            ctypes.memmove(slot.data_ptr(), run.storage.data_ptr() + run.start, slot.nbytes)
        else:
            slot.copy_(_content(run))

    def _torn(self) -> str:
        """Names a tensor that was changed outside an optimizer step while it was copied.

        In-place operations raise a tensor's version; changes through ``.data`` do not, so some
        bytes are compared too: with those of the trigger, and with those of now. Not on an
        accelerator, where reading them would wait for all that is queued.
        """
        for run, first in zip(self.runs, self._first_bytes, strict=True):
            tensor = self.owned[run.storage.data_ptr()]
            changed = tensor._version != self._versions[run.storage.data_ptr()]
            changed |= bytes(_slot(run, self.snapshot)[: len(first)].numpy()) != first
            if changed or not _samples_equal(run, self.snapshot):
                return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        return ""


def _content(run: Run) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=run.storage.device).set_(run.storage)
    return whole[run.start : run.start + run.piece.nbytes]


def _slot(run: Run, snapshot: Tensor) -> Tensor:
    return snapshot[run.piece.offset : run.piece.offset + run.piece.nbytes]


def _first_bytes(run: Run) -> bytes:
    if run.storage.device.type != "cpu":
        return b""
    count = min(run.piece.nbytes, _SAMPLE_BYTES)
    return ctypes.string_at(run.storage.data_ptr() + run.start, count)


def _samples_equal(run: Run, snapshot: Tensor) -> bool:
    if run.storage.device.type != "cpu":
        return True
    live, copied = _content(run), _slot(run, snapshot)
    step = max(1, run.piece.nbytes // _SAMPLES)
    return all(
        torch.equal(live[i : i + _SAMPLE_BYTES], copied[i : i + _SAMPLE_BYTES])
        for i in range(0, run.piece.nbytes, step)
    )
