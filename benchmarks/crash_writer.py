"""Saves without torch: what a writer is given, step by step, with known bytes."""

from __future__ import annotations

import os
import random
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.crash_disk import Boundaries, Fault, no_fault
from benchmarks.crash_process import Report
from benchmarks.crash_trainer import LAST, torn
from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Event,
    Failed,
    Link,
    Piece,
    Remove,
    Save,
    SaveFile,
    SaveFolder,
)
from lightning_dist.checkpoint.disk.manifest import NAME, Manifest, Origin
from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.verify import Description
from lightning_dist.checkpoint.disk.writer import Writer

RECORDS = ("data.pkl", "byteorder", "data/0", "data/1")
_PEER_TIMEOUT_S = 0.5
_ALIGNMENT = 64


@dataclass(frozen=True)
class Scenario:
    """What is written and how.

    ``layout``: one file, a folder of one rank, or one of two ranks. ``same_name``: a save replaces
    the one before. ``link``: also shown as ``last.ckpt``. ``exchange``: of the file system.
    """

    layout: str = "single"
    same_name: bool = False
    link: str = ""
    exchange: bool = True
    nbytes: int = 1500

    @property
    def ranks(self) -> int:
        return 2 if self.layout == "ranks" else 1

    def target(self, folder: str, step: int) -> str:
        return f"{folder}/{'model' if self.same_name else f'step={step}'}.ckpt"

    def names(self, step: int) -> set[str]:
        """What is in the folder when ``step`` was the last to be saved."""
        return {os.path.basename(self.target("", step))} | ({LAST} if self.link else set())


_SHOWN = ((False, ""), (True, ""), (False, "hard"), (False, "symbolic"))  # same_name, link
SCENARIOS = (
    *(Scenario(layout, *shown) for layout in ("single", "folder", "ranks") for shown in _SHOWN),
    Scenario("folder", same_name=True, exchange=False),
    Scenario("folder", link="hard", exchange=False),
)


def contents(step: int, nbytes: int) -> dict[str, bytes]:
    """The records of a save."""
    chance = random.Random(step)
    sizes = (200, 6, nbytes, nbytes // 3)
    return {name: chance.randbytes(size) for name, size in zip(RECORDS, sizes, strict=True)}


def saves_of(scenario: Scenario, folder: str, step: int, rank: int) -> tuple[Save, memoryview]:
    """The job of one rank, and the snapshot for it. Every rank has a part of every record."""
    origin = Origin(f"{step:016x}", step, 10**18 + step, scenario.ranks)
    pieces, snapshot = [], b""
    for record, content in contents(step, scenario.nbytes).items():
        low, high = (len(content) * r // scenario.ranks for r in (rank, rank + 1))
        pieces.append(Piece(record, high - low, len(snapshot), low))
        snapshot += content[low:high]
        snapshot += bytes(-len(snapshot) % _ALIGNMENT)
    target = scenario.target(folder, step)
    if scenario.layout == "single":
        return SaveFile(origin, target, tuple(pieces)), memoryview(snapshot)
    save = SaveFolder(
        origin, target, tuple(pieces), rank, RECORDS, peer_timeout=_PEER_TIMEOUT_S
    )  # fmt: skip
    return save, memoryview(snapshot)


@dataclass(frozen=True)
class Script:
    """What one rank's writer does in a process of its own: steps, one after the other.

    ``fault`` acts on this rank in step ``armed``. With ``resume`` it first becomes the owner of the
    folder. ``superseded`` is removed after the first save.
    """

    scenario: Scenario
    folder: str
    steps: Sequence[int]
    rank: int = 0
    armed: int = 0
    fault: Fault = no_fault
    resume: bool = False
    superseded: Sequence[str] = ()
    before_step: Callable[[int], None] = lambda step: None
    find_storage: Callable[[str], tuple[Storage, str]] = storage_of

    def run(self, report: Report) -> None:
        step = 0

        def tell(event: Event) -> None:
            if isinstance(event, Committed):
                report("committed", step=event.origin.step, target=event.target, rank=self.rank)
            elif isinstance(event, Failed):
                failed = None if event.origin is None else event.origin.step
                report("failed", step=failed, target=event.target, reason=event.reason,
                       rank=self.rank, phase=step)  # fmt: skip

        if self.resume and self.rank == 0:
            lock = own(self.folder)
            found = newest_valid(self.folder)
            report("opened", step=_step(found), seconds=0.0, torn=torn(self.folder))
        boundaries = Boundaries(self.fault, exchange=self.scenario.exchange)
        writer = Writer(report=tell, find_storage=self.find_storage)
        superseded = list(self.superseded)
        for step in self.steps:
            self.before_step(step)
            boundaries.armed = step == self.armed
            writer.do(*saves_of(self.scenario, self.folder, step, self.rank))
            if self.rank == 0:
                superseded = self._after_save(writer, step, superseded)
            boundaries.armed = False
            newest = _step(newest_valid(self.folder)) if self.rank == 0 else None
            report("done", step=step, newest=newest, operations=len(boundaries.names))
        if self.resume and self.rank == 0 and lock is not None:
            lock.release()
        report("end")

    def _after_save(self, writer: Writer, step: int, superseded: list[str]) -> list[str]:
        """As a callback that keeps one checkpoint asks for it."""
        scenario, nothing = self.scenario, memoryview(b"")
        target = scenario.target(self.folder, step)
        if scenario.link:
            symbolic = scenario.link == "symbolic"
            writer.do(Link(target, f"{self.folder}/{LAST}", symbolic), nothing)
        for path in superseded:
            if path != target:
                writer.do(Remove(path), nothing)
        return [target]


def is_content(path: str, step: int, nbytes: int) -> bool:
    """Whether the checkpoint at ``path`` holds, to the byte, what was saved at ``step``."""
    return _records(path) == contents(step, nbytes)


def _records(path: str) -> dict[str, bytes]:
    if not os.path.isdir(path):
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(f"archive/{name}") for name in RECORDS}
    with open(f"{path}/{NAME}", "rb") as file:
        manifest = Manifest.from_json(file.read(), path=path)
    found = {}
    for record, parts in manifest.records.items():
        found[record] = b""
        for part in parts:
            with open(f"{path}/{part.file}", "rb") as shard:
                shard.seek(part.offset)
                found[record] += shard.read(part.nbytes)
    return found


def _step(found: Description | None) -> int:
    return 0 if found is None or found.origin is None else found.origin.step
