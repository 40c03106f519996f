"""The writer's end of the channel to its trainer: the main loop of the writer process.

The process is in a session of its own and ignores the signals that end a job, so it finishes the
saves it was given after its trainer has been killed. Then it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from lightning_dist.checkpoint.disk.folder_owner import Lock, own_as_writer
from lightning_dist.checkpoint.disk.jobs import Event, Job, Owned
from lightning_dist.checkpoint.disk.writer import Writer

_HEARTBEAT = 1.0
_NICE = 5
"""The training goes first."""


class _Service:
    def __init__(self, channel: Connection, *, trainer: int, read_back: bool) -> None:
        self._channel = channel
        self._trainer = trainer
        self._snapshots: dict[int, memoryview] = {}
        self._locks: dict[str, Lock | None] = {}
        self._held: list[int] = []  # locks that the trainer has taken for this process
        self._writer = Writer(report=self._report, read_back=read_back, orphaned=self._orphaned)

    def run(self) -> None:
        while True:
            try:
                # A process that the trainer has forked may hold the other end open after its death.
                while not self._channel.poll(_HEARTBEAT):
                    if self._orphaned():
                        return
                command, *arguments = self._channel.recv()
            except (EOFError, ConnectionResetError):
                return
            getattr(self, f"_{command}")(*arguments)

    def _own(self, folder: str) -> None:
        self._locks[folder] = own_as_writer(folder)
        self._report(Owned(folder))

    def _hold(self) -> None:
        self._held.append(recv_handle(self._channel))

    def _map(self, number: int, nbytes: int) -> None:
        descriptor = recv_handle(self._channel)
        self._snapshots[number] = memoryview(mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ))
        os.close(descriptor)

    def _do(self, job: Job, number: int | None) -> None:
        self._writer.do(job, self._snapshots[number] if number is not None else memoryview(b""))

    def _report(self, event: Event | Owned) -> None:
        if not self._orphaned():
            try:
                self._channel.send(event)
            except (BrokenPipeError, ConnectionResetError):
                return  # nobody listens any more; the file is what counts

    def _orphaned(self) -> bool:
        return os.getppid() != self._trainer


def main(descriptor: int, options: dict[str, Any]) -> None:
    """Serve the trainer at the other end of the socket ``descriptor``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _go_second()
    _Service(Connection(descriptor), **options).run()


def _go_second() -> None:
    os.nice(_NICE)
    # Where Linux shares the processor between sessions first, `nice` counts only within one.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
        autogroup.write(str(_NICE))
