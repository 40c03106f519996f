"""Object stores: no renames, no locks, files that appear when they are complete."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import fsspec
import pytest
from snapshots import (
    assert_equal,
    file_save,
    folder_saves,
    origin,
    small_state,
    write_file,
    write_folder,
)  # fmt: skip
from stores import Bucket

from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.disk.jobs import Committed, Event, Failed, Link, Remove
from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.disk.storage import ObjectStorage, storage_of
from lightning_dist.checkpoint.disk.verify import verify
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.reading import consolidate, load


@pytest.fixture(params=["memory", "bucket"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL under which nothing is."""
    url = f"{request.param}://{uuid.uuid4().hex}/run"
    yield url
    filesystem, inside = fsspec.core.url_to_fs(url)
    if filesystem.exists(inside):
        filesystem.rm(inside, recursive=True)
    assert not filesystem.exists(inside)


def names(place: str) -> list[str]:
    storage, inside = storage_of(place)
    assert isinstance(storage, ObjectStorage)
    return storage.names(inside)


def do(*jobs: Link | Remove) -> None:
    events: list[Event] = []
    for job in jobs:
        Writer(report=events.append).do(job, memoryview(b""))
    assert not [event for event in events if isinstance(event, Failed)]


def test_a_file_is_written_replaced_linked_and_removed(place: str) -> None:
    write_file(f"{place}/a.ckpt", small_state(1), origin(1))
    write_file(f"{place}/a.ckpt", small_state(2), origin(2))
    do(Link(f"{place}/a.ckpt", f"{place}/last.ckpt", False), Remove(f"{place}/a.ckpt"))
    assert names(place) == ["last.ckpt"]
    assert_equal(load(f"{place}/last.ckpt"), small_state(2))
    found = newest_valid(place)
    assert found is not None
    assert (found.path, found.origin) == (f"{place}/last.ckpt", origin(2))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_folder_is_written_replaced_linked_and_removed(place: str, ranks: int) -> None:
    for step in (1, 2):
        events = write_folder(folder_saves(f"{place}/a.ckpt", small_state(step), ranks, step=step))
        assert [type(event) for event in events] == [Committed] * ranks, events
        assert_equal(load(f"{place}/a.ckpt"), small_state(step))
        left = names(f"{place}/a.ckpt")
        assert len([name for name in left if name.endswith(".bin")]) == len(left) - 1 <= ranks
        assert verify(f"{place}/a.ckpt").kind == "sharded"
    do(Link(f"{place}/a.ckpt", f"{place}/last.ckpt", False), Remove(f"{place}/a.ckpt"))
    assert names(place) == ["last.ckpt"]
    assert_equal(load(f"{place}/last.ckpt"), small_state(2))
    consolidate(f"{place}/last.ckpt", f"{place}/one.ckpt")
    assert_equal(load(f"{place}/one.ckpt"), small_state(2))
    do(Remove(f"{place}/last.ckpt"))
    assert names(place) == ["one.ckpt"]


def test_the_manifest_is_uploaded_last_and_removed_first() -> None:
    bucket = uuid.uuid4().hex
    place = f"bucket://{bucket}"
    write_folder(folder_saves(f"{place}/a.ckpt", small_state(), 2))
    do(Link(f"{place}/a.ckpt", f"{place}/last.ckpt", False), Remove(f"{place}/a.ckpt"))
    for name in ("a.ckpt", "last.ckpt"):
        keys = [key for key in Bucket.uploads if key.startswith(f"{bucket}/{name}/")]
        assert [k for k in keys if k.endswith("/manifest.json")] == [keys[-1]]
    removed = [key for key in Bucket.removed if key.startswith(f"{bucket}/a.ckpt/shard")]
    assert len(removed) == 2
    first = Bucket.removed.index(f"{bucket}/a.ckpt/manifest.json")
    assert first < min(map(Bucket.removed.index, removed))


def test_a_write_that_failed_leaves_the_old_object() -> None:
    """Also when the upload is collected: fsspec would then complete it with what there is."""
    place = f"bucket://{uuid.uuid4().hex}"
    write_file(f"{place}/a.ckpt", small_state(1), origin(1))
    events: list[Event] = []
    save, snapshot = file_save(f"{place}/a.ckpt", small_state(2), origin(2))
    missing = type(save.pieces[0])("data/9", 10, -5)  # its memory is not there
    torn = type(save)(save.origin, save.target, (*save.pieces, missing))

    class Cut:
        """A snapshot whose last piece cannot be read."""

        def __getitem__(self, index: slice) -> memoryview:
            if index.start < 0:
                raise OSError(5, "Input/output error")
            return snapshot[index]

    unreadable: Any = Cut()
    Writer(report=events.append).do(torn, unreadable)
    gc.collect()
    assert [type(event) for event in events] == [Failed]
    assert_equal(load(f"{place}/a.ckpt"), small_state(1))


def test_a_link_to_a_folder_keeps_nothing_of_the_one_before(place: str) -> None:
    storage, inside = storage_of(place)
    for step in (1, 2):
        source = f"{place}/{step}"
        write_folder(folder_saves(source, small_state(step), 2, step=step))
        storage.link(f"{inside}/{step}", f"{inside}/last")
    assert storage.names(f"{inside}/last") == storage.names(f"{inside}/2")
    assert_equal(load(f"{place}/last"), small_state(2))
    assert_equal(load(f"{place}/last/manifest.json"), small_state(2))


def age(place: str, *, days: float) -> None:
    """Everything below is so old."""
    filesystem, inside = fsspec.core.url_to_fs(place)
    for path in filesystem.find(inside):
        filesystem.store[path].modified -= timedelta(days=days)


def test_uploads_that_were_killed_are_removed_when_nobody_can_be_at_work_on_them() -> None:
    place = f"memory://{uuid.uuid4().hex}/run"
    storage, inside = storage_of(place)
    for name, step in (("killed", 1), ("whole", 2), ("replaced", 3), ("under_way", 4), ("odd", 5)):
        write_folder(folder_saves(f"{place}/{name}.ckpt", small_state(step), 2, step=step))
    write_file(f"{place}/file.ckpt", small_state())
    storage.write(f"{inside}/killed.ckpt/.rank-1.{origin(1).save_id}.json", b"{}")
    storage.write(f"{inside}/killed.ckpt/notes.txt", b"of the user")
    for name in ("killed", "under_way"):
        storage.remove(f"{inside}/{name}.ckpt/manifest.json")
    other = f"shard-00001-of-00002-{origin(9).save_id}.bin"
    storage.write(f"{inside}/replaced.ckpt/{other}", b"of a save that was killed before it")
    storage.write(f"{inside}/odd.ckpt/{other}", b"")
    storage.write(f"{inside}/odd.ckpt/manifest.json", b"damaged")
    for name in ("killed", "whole", "replaced", "file", "odd"):
        age(f"{place}/{name}.ckpt", days=2)
    untouched = {name: names(f"{place}/{name}.ckpt") for name in ("whole", "under_way", "odd")}
    assert own(place) is None
    assert names(f"{place}/killed.ckpt") == ["notes.txt"]
    assert {name: names(f"{place}/{name}.ckpt") for name in untouched} == untouched
    assert_equal(load(f"{place}/replaced.ckpt"), small_state(3))
    assert other not in names(f"{place}/replaced.ckpt")
    assert_equal(load(f"{place}/file.ckpt"), small_state())
