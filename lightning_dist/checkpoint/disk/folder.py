"""A folder that several ranks write and one publishes; they meet through files in it.

Every rank writes its shard and then a small *receipt*. Rank 0 waits for all receipts, writes the
manifest and publishes. No collective takes part, so the writers finish even when every trainer is
dead, and a rank that fails says so in its receipt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from lightning_dist.checkpoint.disk.format import (
    NAME,
    CheckpointError,
    DroppedCheckpointError,
    File,
    Manifest,
    Part,
    zeros,
)
from lightning_dist.checkpoint.disk.jobs import SaveFolder, content_nbytes, copy_file, write_shard
from lightning_dist.checkpoint.disk.scan import read_manifest, verify_files
from lightning_dist.checkpoint.disk.storage import Storage

_ORPHAN_TIMEOUT = 10.0
"""Seconds that a writer waits for others once its trainer is dead."""


SLOWEST_UPLOAD, _SLOWEST_READING = 2e6, 50e6
"""Bytes per second of a rank that is still believed to be alive."""


@dataclass(frozen=True)
class Receipt:
    """The files that a rank has written, or the reason why it could not."""

    files: tuple[File, ...] = ()
    parts: tuple[tuple[str, int, Part], ...] = ()
    """``(record, first byte within it, where it is)``"""
    failed: str = ""
    dropped: bool = False
    """The rank gave its snapshot up; nothing is wrong with its disk."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Receipt:
        fields = json.loads(text)
        return cls(
            tuple(File(**file) for file in fields["files"]),
            tuple((record, start, Part(**part)) for record, start, part in fields["parts"]),
            fields["failed"],
            fields["dropped"],
        )

    def require(self, rank: int) -> Receipt:
        """This, unless ``rank`` has failed; then raises CheckpointError."""
        if self.dropped:
            raise DroppedCheckpointError(f"rank {rank}: {self.failed}")
        if self.failed:
            raise CheckpointError(f"rank {rank} could not write: {self.failed}")
        return self


@dataclass(frozen=True)
class SharedFolder:
    """One save of a folder, as one rank sees it.

    Args:
        orphaned: whether this rank's trainer is dead.
        check: raises if this rank cannot write, which its receipt says.
        read_back: read everything and compare before it is published; on all ranks or none.
    """

    save: SaveFolder
    storage: Storage
    target: str
    orphaned: Callable[[], bool]
    check: Callable[[], None] = lambda: None
    read_back: bool = False

    @property
    def _staged(self) -> str:
        return self.storage.staging(self.target, self.save.origin.save_id)

    def _receipt(self, rank: int) -> str:
        return f"{self._staged}/.rank-{rank}.{self.save.origin.save_id}.json"

    def write(self, snapshot: memoryview) -> tuple[int, int]:
        """Write and publish; returns the bytes of this rank, and of all ranks.

        Raises:
            CheckpointError: another rank failed, or did nothing for too long.
            OSError: as the storage says.
        """
        try:
            if self.save.rank == 0:
                self.storage.make_folder(self._staged)
            elif self._staged != self.target:  # object stores have no folders to wait for
                # It may have to remove what a save before has replaced, which nobody sees.
                began = partial(self.storage.exists, self._staged)
                self._await(began, "rank 0 to start", patience=3 * self.save.peer_timeout)
            self.check()
            if self.save.dropped:
                raise DroppedCheckpointError(self.save.dropped)
            receipt = self._contribute(snapshot)
        except Exception as error:
            self._give_up(error)
            raise
        finish = self._publish if self.save.rank == 0 else self._await_publication
        total = finish(receipt).nbytes
        return sum(file.nbytes for file in receipt.files), total

    def _contribute(self, snapshot: memoryview) -> Receipt:
        save = self.save
        files: list[File] = []
        parts: list[Part] = []
        if save.ranges:
            name = self._shard_name
            with self.storage.creating(f"{self._staged}/{name}") as sink:
                file, parts = write_shard(sink, name, save, snapshot)
            files.append(file)
        for name, source in save.files:
            if "/" in name:
                self.storage.make_folder(f"{self._staged}/{name.rpartition('/')[0]}")
            files.append(copy_file(source, self.storage, f"{self._staged}/{name}", name))
        placed = zip(save.ranges, parts, strict=True)
        return Receipt(tuple(files), tuple((p.record, p.start, part) for p, part in placed))

    def _publish(self, own: Receipt) -> Manifest:
        save, storage = self.save, self.storage
        try:
            receipts = [own, *(self._await_receipt(rank) for rank in range(1, save.origin.ranks))]
            manifest = merge(save, receipts)
            if self.read_back:  # before the manifest: in an object store that one publishes
                verify_files(self._staged, storage, self._staged, manifest)
            storage.write(f"{self._staged}/{NAME}", manifest.to_json())
            if self.read_back:
                read_manifest(self._staged, storage, self._staged)
            storage.publish(self._staged, self.target)
        except Exception as error:
            self._give_up(error)
            raise
        kept = {NAME, *(file.name.partition("/")[0] for file in manifest.files)}
        for name in storage.names(self.target):  # receipts, and what had these names before
            if name not in kept:
                storage.remove(f"{self.target}/{name}")
        return manifest

    def _await_receipt(self, rank: int) -> Receipt:
        path = self._receipt(rank)
        self._await(lambda: self.storage.exists(path), f"rank {rank}")
        return Receipt.from_json(self.storage.read(path)).require(rank)

    def _await_publication(self, receipt: Receipt) -> Manifest:
        own, first = self._receipt(self.save.rank), self._receipt(0)
        self._put_receipt(receipt)
        self._await(
            lambda: not self.storage.exists(own) or self.storage.exists(first),
            "rank 0 to publish",
            reading=self.read_back,
        )
        if self.storage.exists(first):  # rank 0 has one only to say that it failed
            Receipt.from_json(self.storage.read(first)).require(0)
        path = f"{self.target}/{NAME}"
        published: Manifest | None = None
        if self.storage.exists(path):
            published = Manifest.from_json(self.storage.read(path), path=path)
        if published is None or published.origin.save_id != self.save.origin.save_id:
            raise CheckpointError("rank 0 abandoned this checkpoint; see its error")
        return published

    def _put_receipt(self, receipt: Receipt) -> None:
        # Under another name first: nobody may read half of it.
        path = self._receipt(self.save.rank)
        staged = self.storage.staging(path, self.save.origin.save_id)
        self.storage.write(staged, receipt.to_json())
        with suppress(FileNotFoundError):  # rank 0 may publish, or give up, as soon as it sees it
            self.storage.publish(staged, path)

    def _give_up(self, error: Exception) -> None:
        dropped = isinstance(error, DroppedCheckpointError)
        reason = str(error) if dropped else f"{type(error).__name__}: {error}"
        if self.save.rank == 0 and self.save.origin.ranks == 1:
            self._remove_files(kept="")
            return
        if self.save.rank == 0:
            self.storage.make_folder(self._staged)
        shard = f"{self._staged}/{self._shard_name}"
        if self.storage.exists(shard):  # a full disk must have room for the receipt
            self.storage.remove(shard)
        if self._staged == self.target or self.storage.exists(self._staged):
            self._put_receipt(Receipt(failed=reason, dropped=dropped))
        if self.save.rank == 0:
            self._remove_files(kept=self._receipt(0).rpartition("/")[2])

    @property
    def remains(self) -> str:
        """Remains of a save that rank 0 abandoned, for those that have yet to learn of it."""
        if self._staged != self.target:
            return self._staged
        return f"{self.save.target}/{self._receipt(0).rpartition('/')[2]}"

    @property
    def _shard_name(self) -> str:
        origin = self.save.origin
        return f"shard-{self.save.rank:05d}-of-{origin.ranks:05d}-{origin.save_id}.bin"

    def _remove_files(self, *, kept: str) -> None:
        if self._staged != self.target and not kept:
            self.storage.remove(self._staged)
            return
        for name in self.storage.names(self._staged):
            ours = self._staged != self.target or self.save.origin.save_id in name
            if ours and name != kept:
                self.storage.remove(f"{self._staged}/{name}")

    def _await(
        self,
        condition: Callable[[], bool],
        what: str,
        *,
        patience: float | None = None,
        reading: bool = False,
    ) -> None:
        """Wait as long as somebody writes something, or may be ``reading`` it all."""
        pause, seen, since = 0.005, -1, time.monotonic()
        while not condition():
            limit = patience or self.save.peer_timeout
            if self._staged == self.target:  # an upload is seen when it is complete
                limit += content_nbytes(self.save) / SLOWEST_UPLOAD
            written = self.storage.tree_nbytes(self._staged)
            if reading:
                limit += written / _SLOWEST_READING
            if self.orphaned():
                limit = min(limit, _ORPHAN_TIMEOUT)
            now = time.monotonic()
            if written != seen:
                seen, since = written, now
            elif now - since > limit:
                raise CheckpointError(
                    f"waited for {what}, but no rank wrote anything for {limit:.0f} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.2)


def merge(save: SaveFolder, receipts: list[Receipt]) -> Manifest:
    """The manifest of a folder from what the ranks wrote.

    Raises:
        CheckpointError: the ranks wrote a record twice, or not all of one that may have no gaps.
    """
    placed: dict[str, list[tuple[int, Part]]] = {record: [] for record in save.records}
    for receipt in receipts:
        for record, start, part in receipt.parts:
            placed[record].append((start, part))
    gaps, sizes = dict(save.spread), dict(save.complete)
    return Manifest(
        save.origin,
        tuple(file for receipt in receipts for file in receipt.files),
        {
            record: _whole(record, found, gaps.get(record), length=sizes.get(record))
            for record, found in placed.items()
        },
    )


def _whole(
    record: str, placed: list[tuple[int, Part]], nbytes: int | None, *, length: int | None
) -> tuple[Part, ...]:
    """The parts in order; zeros in the gaps if ``nbytes`` says how long the record is."""
    parts: list[Part] = []
    end = 0
    for start, part in sorted(placed, key=lambda each: each[0]):
        if start < end or (start > end and nbytes is None):
            raise CheckpointError(f"bytes {end} to {start} of {record} were not written once")
        if start > end:
            parts.append(zeros(start - end))
        parts.append(part)
        end = start + part.nbytes
    if nbytes is not None and nbytes > end:
        parts.append(zeros(nbytes - end))
    if length is not None and length != end:
        raise CheckpointError(f"bytes {end} to {length} of {record} were not written once")
    return tuple(parts)
