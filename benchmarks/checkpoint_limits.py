"""What no way to save can beat, as rows of the checkpoint benchmark."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.checkpoint_row import Row
from benchmarks.checkpoint_state import Training, tensors_of

_SLICE = 8 << 20


class CopyRow(Row):
    """Copies all tensors into memory that has been written before; saves nothing."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._copies = [torch.zeros_like(tensor) for tensor in tensors_of(training.state())]

    def save(self, target: Path) -> None:
        for copy, tensor in zip(self._copies, tensors_of(self.training.state()), strict=True):
            copy.copy_(tensor.detach())


class WriteRow(Row):
    """write(2) and fsync of memory of the state's size, in one run.

    Args:
        early: have the kernel begin to write after every slice, not at the fsync.
    """

    def __init__(self, training: Training, *, early: bool) -> None:
        super().__init__(training)
        self._early = early
        nbytes = sum(tensor.nbytes for tensor in tensors_of(training.state()))
        self._bytes = memoryview(torch.randint(256, (nbytes,), dtype=torch.uint8).numpy())

    def save(self, target: Path) -> None:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            written = 0
            while written < self._bytes.nbytes:
                count = os.write(file, self._bytes[written : written + _SLICE])
                if self._early:
                    os.posix_fadvise(file, written, count, os.POSIX_FADV_DONTNEED)
                written += count
            os.fsync(file)
        finally:
            os.close(file)
