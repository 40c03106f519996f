"""Writer of a trainer, in a process of its own or in a thread, and the memory that it reads."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.disk.folder_owner import lock_to_send
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Event, Job, Owned
from lightning_dist.checkpoint.disk.writer import Writer

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
        """View of the bytes, for a writer in this process."""
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


AnyWriter: TypeAlias = "WriterThread | WriterProcess"
"""A writer, as its trainer sees it. Jobs are done in the order in which they are sent."""
Report: TypeAlias = Callable[[AnyWriter, Event], None]


_START_TIMEOUT = 60.0
"""Seconds; a tenth of one is needed on an idle machine."""

_TAIL = 4096
"""Last bytes of the output of the writer."""

# The writer needs the standard library and lightning_dist.checkpoint.disk only, and is to be found
# where this process has found it: the outer package is a stand-in with a path.
_BOOT = """
import json, sys, types
package = types.ModuleType("lightning_dist")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_dist"] = package
from lightning_dist.checkpoint.disk.writer import main
main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


class WriterThread:
    """Writes on a thread of this process: what is in memory here is seen by others here."""

    def __init__(self, *, report: Report, read_back: bool) -> None:
        self._writer = Writer(report=partial(report, self), read_back=read_back)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._last: Future[None] | None = None

    def own(self, folder: str) -> None:
        """Nothing: the trainer's own lock lives exactly as long."""

    def send(self, job: Job, memory: SnapshotMemory | None) -> None:
        """Hand ``job`` to the thread."""
        snapshot = memoryview(b"") if memory is None else memory.view()
        self._last = self._executor.submit(self._writer.do, job, snapshot)

    def close(self, timeout: float | None = None) -> None:
        """Let it finish what it was given, and end. Raises CheckpointError after ``timeout`` s."""
        self._executor.shutdown(wait=False)
        if self._last is not None and wait([self._last], timeout).not_done:
            raise CheckpointError(f"the checkpoint writer is still running after {timeout} s")


class WriterProcess:
    """Writes in a process that goes on when this one is killed.

    Args:
        lost: called with the reason if the process ends before it was asked to.
    """

    def __init__(
        self, *, report: Report, lost: Callable[[WriterProcess, str], None], read_back: bool
    ) -> None:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).resolve().parent.parent)
        options = json.dumps({"trainer": os.getpid(), "read_back": read_back})
        self._errors = os.memfd_create("lightning_dist-errors", os.MFD_CLOEXEC)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, package, str(theirs.fileno()), options],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # readers of the trainer's output do not wait for it
            stderr=self._errors,
            start_new_session=True,  # launchers kill the process group of a failed rank
        )
        theirs.close()
        self._channel = Connection(ours.detach())
        self._mapped: dict[int, int] = {}
        self._report, self._lost = report, lost
        self._owned: SimpleQueue[Owned | None] = SimpleQueue()
        self._closing = False
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="checkpoint-events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def own(self, folder: str) -> None:
        """Keep other trainers from ``folder`` until the writer has ended."""
        with suppress(CheckpointError):  # its end is reported with what it should have done
            if (lock := lock_to_send(folder)) is not None:
                # It is kept while it is on its way, so nobody has to wait for the writer to start.
                try:
                    self._put("hold", descriptor=lock.descriptor)
                finally:
                    lock.close()
                return
            # Until it has the lock, a trainer that replaces this one would not wait for it.
            self._put("own", folder)
            self._await_lock(folder)

    def _await_lock(self, folder: str) -> None:
        try:
            self._owned.get(timeout=_START_TIMEOUT)
        except Empty:
            self._process.kill()
            raise CheckpointError(
                f"the checkpoint writer (process {self.pid}) did not lock {folder} within "
                f"{_START_TIMEOUT:.0f} s and was ended; is the filesystem responding?"
            ) from None

    def send(self, job: Job, memory: SnapshotMemory | None) -> None:
        """Send ``job``; raises CheckpointError if the writer is gone."""
        number = None
        if memory is not None and memory.nbytes:  # a rank may have nothing to write
            number = id(memory)
            if self._mapped.get(number) != memory.generation:
                self._put("map", number, memory.nbytes, descriptor=memory.descriptor)
                self._mapped[number] = memory.generation
        self._put("do", job, number)

    def close(self, timeout: float | None = None) -> None:
        """Let it finish what it was given, and end. Raises CheckpointError after ``timeout`` s."""
        self._closing = True
        # End of file for the writer; the descriptor itself stays ours until the events are read.
        with socket.socket(fileno=os.dup(self._channel.fileno())) as ours:
            ours.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"the checkpoint writer (process {self.pid}) is still running after {timeout:.0f} "
                "s; it continues without this process"
            ) from None
        self._reader.join(_START_TIMEOUT)
        self._channel.close()
        if self._process.returncode:  # killed when it was already asked to end
            self._lost(self, self._ended())
        os.close(self._errors)

    def _put(self, *command: object, descriptor: int | None = None) -> None:
        """Send a command, and right after it the descriptor that it is about."""
        with self._sending:
            try:
                self._channel.send(command)
                if descriptor is not None:
                    send_handle(self._channel, descriptor, self.pid)
            except OSError as error:
                raise CheckpointError(self._ended()) from error

    def _read(self) -> None:
        while True:
            try:
                event = self._channel.recv()
            except (EOFError, OSError):
                break
            if isinstance(event, Owned):
                self._owned.put(event)
            else:
                self._report(self, event)
        self._owned.put(None)
        if not self._closing:
            self._lost(self, self._ended())

    def _ended(self) -> str:
        code = self._process.wait()
        ended = f"the checkpoint writer (process {self.pid}) has ended with exit status {code}"
        with suppress(OSError):  # closed
            start = max(os.fstat(self._errors).st_size - _TAIL, 0)
            output = os.pread(self._errors, _TAIL, start).decode(errors="replace").strip()
            if output:
                log.error("%s:\n%s", ended, output)
                return f"{ended}: {output.splitlines()[-1]}"
        return ended
