"""What the thread of a :class:`~lightning_dist.profiling.capture.gathering.Gatherer` does.

A sender has a package per request, of parts of one or several ranks. Requests of different ranks
meet in their order; no collective is among them, so that a rank that is gone fails alone.
"""

from __future__ import annotations

import queue
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.profiling.peer import first_sentence, receive, send

_MORE, _LAST, _END = range(3)
"""What follows a package: another one; one at the next call; nothing any more."""

_PART = struct.Struct(">IQ")  # rank, length of what follows


@dataclass(frozen=True)
class Request:
    """Lines of this rank; ``is_end``: there will be no more."""

    lines: bytes
    is_end: bool = False


class Courier:
    """Takes what ``senders`` have to ``receiver``, with what this rank has; or writes it.

    Args:
        receiver: None: this is rank 0.
        limit: bytes of this rank in one package, before they are compressed.
        problems: what goes wrong is added to it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup,
        receiver: int | None,
        senders: Sequence[int],
        limit: int,
        problems: list[str],
    ) -> None:
        self.receiver = receiver
        self.taken = 0
        """Bytes of this rank that were sent, or are about to be."""
        self.is_over = False
        self._folder, self._group, self._limit = folder, group, limit
        self._senders = list(senders)
        self._problems = problems
        self._pending = bytearray()
        self._unwritable: set[int] = set()

    def run(self, requests: queue.SimpleQueue[Request]) -> None:
        """Serve all requests until the last, or until the way to the receiver is cut."""
        try:
            while not self.is_over:
                request = requests.get()
                self._pending += request.lines
                self._serve(is_end=request.is_end)
                self.is_over = request.is_end
        except RuntimeError as error:  # of gloo
            self._problems.append(
                f"lines do not reach rank {self.receiver}: {first_sentence(error)}"
            )
            self.is_over = True

    def _serve(self, *, is_end: bool) -> None:
        outgoing = bytearray()
        for sender in list(self._senders):
            for package in self._packages(sender, is_end=is_end):
                if self.receiver is None:
                    self._write(package)
                    continue
                outgoing += package
                if len(outgoing) >= self._limit:
                    self._send(outgoing, _MORE)
                    outgoing = bytearray()
        if self.receiver is None:
            return
        outgoing += self._own()
        while is_end and self._pending:
            self._send(outgoing, _MORE)
            outgoing = self._own()
        self._send(outgoing, _END if is_end else _LAST)

    def _own(self) -> bytearray:
        """The next part of this rank: whole lines, unless one alone is longer than the limit."""
        size = min(len(self._pending), self._limit)
        if size < len(self._pending):
            size = self._pending.rfind(b"\n", 0, size) + 1 or size
        lines = bytes(self._pending[:size])
        del self._pending[:size]
        self.taken += size
        if not lines:
            return bytearray()
        content = zlib.compress(lines)
        return bytearray(_PART.pack(self._group.rank(), len(content)) + content)

    def _send(self, package: bytearray, what_follows: int) -> None:
        assert self.receiver is not None
        head = torch.tensor([len(package), what_follows], device="cpu")
        send(head, to=self.receiver, group=self._group)
        if package:
            content = torch.frombuffer(package, dtype=torch.uint8)
            send(content, to=self.receiver, group=self._group)

    def _packages(self, sender: int, *, is_end: bool) -> Iterator[bytes]:
        """What ``sender`` has for this call, or to the end all that it ever has.

        It may have called less often than this rank, or more often: an error ended its training.
        """
        while sender in self._senders:
            head = torch.zeros(2, dtype=torch.int64, device="cpu")
            try:
                receive(head, source=sender, group=self._group)
                length, what_follows = head.tolist()
                package = bytearray(length)
                if length:
                    content = torch.frombuffer(package, dtype=torch.uint8)
                    receive(content, source=sender, group=self._group)
            except RuntimeError as error:  # of gloo; it concerns this one only
                self._senders.remove(sender)
                self._problems.append(
                    f"nothing more comes from rank {sender}: {first_sentence(error)}"
                )
                return
            if what_follows == _END:
                self._senders.remove(sender)
            yield bytes(package)
            if what_follows == _LAST and not is_end:
                return

    def _write(self, package: bytes) -> None:
        position = 0
        while position < len(package):
            rank, length = _PART.unpack_from(package, position)
            position += _PART.size
            lines = zlib.decompress(package[position : position + length])
            position += length
            if rank in self._unwritable:  # a gap in the middle would not be seen
                continue
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / f"rank{rank}.jsonl").open("ab") as file:
                    file.write(lines)
            except OSError as error:
                self._unwritable.add(rank)
                self._problems.append(f"lines of rank {rank} are not written: {error.strerror}")
