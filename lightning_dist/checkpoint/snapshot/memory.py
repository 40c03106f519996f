"""Host memory that the trainer fills and its writer reads, each in its own process."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

from lightning_dist.base.log import get_logger

log = get_logger(__name__)


class SnapshotMemory:
    """A buffer without a name: gone when the last process that maps it ends, however it ends.

    It is kept from save to save, because the first touch of a page costs more than the copy.
    ``generation`` changes when it had to grow and must be mapped anew.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.generation = 0
        self.descriptor = -1
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def reserve(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` bytes, as a uint8 tensor; what was in them is lost if it grows."""
        if nbytes > self.nbytes:
            self.release()
            size = nbytes + -nbytes % mmap.PAGESIZE
            if hasattr(os, "memfd_create"):
                self.descriptor = os.memfd_create("lightning_dist", os.MFD_CLOEXEC)
                os.ftruncate(self.descriptor, size)
            # Without a descriptor (not on Linux) only a writer in this process sees it.
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
            self.nbytes = size
            self.generation += 1
            is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._pinned = is_used and _pin(self.bytes)
        return self.bytes[:nbytes]

    def view(self) -> memoryview:
        """The same bytes, for a writer in this process."""
        return memoryview(self.bytes.numpy())  # type: ignore[arg-type]

    def release(self) -> None:
        """Give the memory back, once the last tensor and view of it are gone."""
        if self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostUnregister(self.bytes.data_ptr()))
            self._pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self.nbytes = -1, 0


def _pin(buffer: Tensor) -> bool:
    # Pageable memory is copied to at a fraction of the rate, and not asynchronously.
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        log.warning("Snapshots are copied slowly: cudaHostRegister returned %d", code)
        with suppress(RuntimeError):  # or the error would be raised by the next kernel
            torch.zeros(1, device="cuda")
    return not code
