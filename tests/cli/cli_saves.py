"""Checkpoints of every kind, written by the engine's own writer."""

import io
import itertools
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_dist.checkpoint.disk.format import Origin
from lightning_dist.checkpoint.disk.jobs import Committed, Event, RecordRange, SaveFile, SaveFolder
from lightning_dist.checkpoint.disk.writer import Writer

RECORDS = {"data.pkl": b"p" * 100, "data/0": bytes(range(256)) * 8, "version": b"3\n"}
_STEPS = itertools.count(1)


def origin(path: str | Path, step: int = 0, *, ranks: int = 1) -> Origin:
    """Of a save to ``path``, newer than those before; ``step`` seconds after 2020 began."""
    step = step or next(_STEPS)
    name = str(path).rsplit("/", 1)[-1]
    return Origin(os.urandom(8).hex(), step, (1_577_836_800 + step) * 10**9, ranks, name=name)


def save_file(path: str | Path, *, step: int = 0, records: dict[str, bytes] = RECORDS) -> str:
    ranges, snapshot = _laid_out(records)
    _done(SaveFile(origin(path, step), str(path), ranges), snapshot)
    return str(path)


def save_sharded(
    path: str | Path, *, step: int = 0, ranks: int = 2, records: dict[str, bytes] = RECORDS
) -> str:
    """Every rank has a part of every record."""
    whole = origin(path, step, ranks=ranks)

    def write(rank: int) -> None:
        spans = {n: (len(c) * rank // ranks, len(c) * (rank + 1) // ranks)
                 for n, c in records.items()}  # fmt: skip
        ranges, snapshot = _laid_out({n: records[n][slice(*span)] for n, span in spans.items()})
        ranges = tuple(
            replace(record_range, start=spans[record_range.record][0]) for record_range in ranges
        )
        _done(SaveFolder(whole, str(path), ranges, rank, tuple(records)), snapshot)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(write, range(ranks)))
    return str(path)


def save_folder(path: str | Path, content: Path, *, step: int = 0) -> str:
    """A folder of ordinary files."""
    _done(
        SaveFolder(origin(path, step), str(path), (), 0, files=((content.name, str(content)),)), b""
    )
    return str(path)


def records_of(state: Any) -> dict[str, bytes]:
    """The records of the archive that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def damage(path: Path, *, at: int | None = None) -> None:
    """Flip a bit of the file, in its middle unless told."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def _laid_out(records: dict[str, bytes]) -> tuple[tuple[RecordRange, ...], bytes]:
    offsets = itertools.accumulate(map(len, records.values()), initial=0)
    ranges = (
        RecordRange(n, len(c), o) for (n, c), o in zip(records.items(), offsets, strict=False)
    )
    return tuple(ranges), b"".join(records.values())


def _done(job: SaveFile | SaveFolder, snapshot: bytes) -> None:
    events: list[Event] = []
    Writer(report=events.append).do(job, memoryview(snapshot))
    assert [type(event) for event in events] == [Committed], events
