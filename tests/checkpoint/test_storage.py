"""Local folders and object stores: what is published is there as a whole, the old is gone."""

import ctypes
import errno
import gc
import os
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from snapshots import (
    assert_equal,
    damage,
    file_save,
    folder_saves,
    origin,
    small_state,
    write_file,
    write_folder,
)
from stores import Bucket

from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.disk.jobs import Committed, Event, Failed, Link, Remove
from lightning_dist.checkpoint.disk.scan import checkpoints, newest_valid, recover, verify
from lightning_dist.checkpoint.disk.storage import LocalStorage, ObjectStorage, local, storage_of
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.reading import consolidate, load

STORAGE = LocalStorage()
Make = Callable[[Path, str], None]


def file(path: Path, content: str) -> None:
    path.write_text(content)


def folder(path: Path, content: str) -> None:
    path.mkdir()
    (path / "a").write_text(content)
    (path / "manifest.json").write_text(content)


def link_to_file(path: Path, content: str) -> None:
    real = path.parent / f"real {content}"
    real.write_text(content)
    path.symlink_to(real.name)


def link_to_folder(path: Path, content: str) -> None:
    folder(path.parent / f"real {content}", content)
    path.symlink_to(f"real {content}")


def content(path: Path) -> str:
    return (path / "a").read_text() if path.is_dir() else path.read_text()


def without_renameat2(patch: pytest.MonkeyPatch) -> None:
    """As a filesystem that has no exchange, such as NFS, answers."""

    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            self.renameat2 = lambda *_: -1

    patch.setattr(ctypes, "CDLL", Library)


MAKERS = [file, folder, link_to_file, link_to_folder]


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "without"])
@pytest.mark.parametrize("old", [None, *MAKERS])
@pytest.mark.parametrize("new", MAKERS)
def test_publishing_replaces_whatever_had_the_name(
    tmp_path: Path, new: Make, old: Make | None, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.ckpt"
    if old is not None:
        old(target, "old")
    staged = Path(STORAGE.staging(str(target), origin().save_id))
    new(staged, "new")
    if not exchange:
        without_renameat2(monkeypatch)
    STORAGE.publish(str(staged), str(target))
    assert content(target) == "new"
    kept = {"x.ckpt", "real old", "real new"}
    assert {path.name for path in tmp_path.iterdir()} <= kept, "something was left behind"
    if old in (link_to_file, link_to_folder):
        assert content(tmp_path / "real old") == "old", "what the old link showed was touched"


@pytest.mark.parametrize("nbytes", [231, 232, 248, 255])
def test_names_of_any_length_that_a_file_may_have(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is staged and set aside beside them has longer ones."""
    folder, one = tmp_path / "folder", "é" * 40
    names = [f"{each}{one}".ljust(nbytes - 40 - len(".ckpt"), "x") + ".ckpt" for each in "ab"]
    assert {len(os.fsencode(name)) for name in names} == {nbytes}
    folder.mkdir()
    without_renameat2(monkeypatch)
    for name in names:
        for step in (1, 2):
            staged = STORAGE.staging(str(folder / name), origin(step).save_id)
            whole_folder(str(tmp_path / "elsewhere"), step)
            os.rename(tmp_path / "elsewhere", staged)
            STORAGE.publish(staged, str(folder / name))
        assert_equal(load(str(folder / name)), small_state(2))
    os.mkdir(STORAGE.staging(str(folder / names[0]), origin(3).save_id))  # killed
    assert local.cut_off(STORAGE, str(folder)) == []
    recover(STORAGE, str(folder))
    assert sorted(os.listdir(folder)) == names
    STORAGE.remove(str(folder / names[0]))
    assert os.listdir(folder) == names[1:]


class Killed(BaseException):
    pass


def whole_file(path: str, step: int) -> None:
    write_file(path, small_state(step), origin(step))


def whole_folder(path: str, step: int) -> None:
    write_folder(folder_saves(path, small_state(step), 1, step=step))


def stage(folder: Path, new: Any = whole_folder) -> Path:
    """What is to replace the folder x.ckpt of an earlier step; renames are one after the other."""
    whole_folder(str(folder / "x.ckpt"), 1)
    staged = STORAGE.staging(str(folder / "x.ckpt"), origin(2).save_id)
    new(str(folder / "elsewhere"), 2)
    os.rename(folder / "elsewhere", staged)
    return Path(staged)


def cut_before_rename(
    number: int, folder: Path, patch: pytest.MonkeyPatch, new: Any = whole_folder
) -> Path:
    """A replacement that was killed: before the second rename, the old one has lost its name."""
    staged = stage(folder, new)
    without_renameat2(patch)
    renames, rename = [], os.rename

    def killed(*paths: str) -> None:
        renames.append(paths)
        if len(renames) == number:
            raise Killed
        rename(*paths)

    with patch.context() as only_here:
        only_here.setattr(os, "rename", killed)
        with pytest.raises(Killed):
            STORAGE.publish(str(staged), str(folder / "x.ckpt"))
    return staged


@pytest.mark.parametrize("cut", [1, 2], ids=["before the first rename", "between the two"])
@pytest.mark.parametrize("new", [whole_file, whole_folder])
def test_recover_finishes_what_was_cut_between_two_renames(
    tmp_path: Path, new: Any, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_before_rename(cut, tmp_path, monkeypatch, new)
    recover(STORAGE, str(tmp_path))
    assert_equal(load(f"{tmp_path}/x.ckpt"), small_state(cut))
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_what_was_replaced_is_known_as_such_where_it_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not what recovery gives its name back to: the folder is on disk with the new one."""
    target, staged = tmp_path / "x.ckpt", stage(tmp_path)
    without_renameat2(monkeypatch)
    synced = []

    def failing(path: str) -> None:
        synced.append(path)
        if path == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(local, "_sync_folder", failing)
    with pytest.raises(OSError, match="error"):
        STORAGE.publish(str(staged), str(target))
    assert synced
    (left,) = STORAGE.leftovers(str(tmp_path))
    assert ".trash-" in left
    assert_equal(load(str(target)), small_state(2))


@pytest.mark.parametrize("new", [whole_file, whole_folder])
def test_recover_gives_the_old_one_its_name_back_where_the_staged_twin_is_damaged(
    tmp_path: Path, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(cut_before_rename(2, tmp_path, monkeypatch, new))
    recover(STORAGE, str(tmp_path))
    assert_equal(load(str(tmp_path / "x.ckpt")), small_state(1))
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_recover_gives_the_old_one_its_name_back_where_there_is_no_staged_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = cut_before_rename(2, tmp_path, monkeypatch)
    STORAGE.remove(str(staged))
    assert [found.path for found in checkpoints(str(tmp_path))], "nobody finds the old one"
    recover(STORAGE, str(tmp_path))
    assert_equal(load(str(tmp_path / "x.ckpt")), small_state(1))


class UnreadableStorage(LocalStorage):
    """A disk that reads nothing of staged files, and says why."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def open(self, path: str) -> Any:
        if ".tmp-" in path:
            raise self._error
        return super().open(path)


CANNOT_JUDGE = [OSError(errno.EIO, "I/O error"), OSError(errno.ESTALE, "stale handle")]


@pytest.mark.parametrize("error", CANNOT_JUDGE, ids=["EIO", "ESTALE"])
@pytest.mark.parametrize("cut", [True, False], ids=["between two renames", "before the first"])
def test_recover_touches_nothing_that_it_cannot_read_and_says_so(
    tmp_path: Path,
    cut: bool,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    staged = cut_before_rename(2, tmp_path, monkeypatch)
    if not cut:
        for path in tmp_path.iterdir():
            if path != staged:
                STORAGE.remove(str(path))
    before = sorted(os.listdir(tmp_path))
    recover(UnreadableStorage(error), str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == before
    assert f"could not read {staged}" in caplog.text
    assert str(error) in caplog.text
    recover(STORAGE, str(tmp_path))  # the error was transient
    assert_equal(load(str(tmp_path / "x.ckpt")), small_state(2))
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_recover_leaves_what_a_newer_version_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    staged = Path(STORAGE.staging(f"{tmp_path}/x.ckpt", origin().save_id))
    with monkeypatch.context() as newer:
        newer.setattr("lightning_dist.checkpoint.disk.format.VERSION", 2)
        whole_folder(str(tmp_path / "elsewhere"), 1)
    os.rename(tmp_path / "elsewhere", staged)
    recover(STORAGE, str(tmp_path))
    assert os.listdir(tmp_path) == [staged.name]
    assert "newer lightning_dist" in caplog.text


@pytest.mark.parametrize("old", [None, *MAKERS])
@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("make", [file, folder])
def test_links_show_the_same_content_and_survive_removal_unless_symbolic(
    tmp_path: Path, make: Make, symbolic: bool, old: Make | None
) -> None:
    make(tmp_path / "x.ckpt", "new")
    if old is not None:
        old(tmp_path / "last.ckpt", "old")
    STORAGE.link(str(tmp_path / "x.ckpt"), str(tmp_path / "last.ckpt"), symbolic=symbolic)
    assert content(tmp_path / "last.ckpt") == "new"
    assert (tmp_path / "last.ckpt").is_symlink() == symbolic
    STORAGE.remove(str(tmp_path / "x.ckpt"))
    assert (tmp_path / "last.ckpt").exists() != symbolic
    assert not STORAGE.leftovers(str(tmp_path))


def test_a_folder_that_is_linked_gets_its_manifest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed link is then nothing that ``recover`` would take for a whole folder."""
    folder(tmp_path / "x.ckpt", "new")
    (tmp_path / "x.ckpt" / "shard").write_text("s")
    linked, link = [], os.link
    monkeypatch.setattr(os, "link", lambda *p: (linked.append(os.path.basename(p[0])), link(*p)))
    STORAGE.link(str(tmp_path / "x.ckpt"), str(tmp_path / "last.ckpt"))
    assert linked == ["a", "shard", "manifest.json"]


def test_a_filesystem_without_hard_links_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    file(tmp_path / "x.ckpt", "new")
    monkeypatch.setattr(os, "link", refuse)
    STORAGE.link(str(tmp_path / "x.ckpt"), str(tmp_path / "last.ckpt"))
    assert content(tmp_path / "last.ckpt") == "new"
    assert (tmp_path / "last.ckpt").stat().st_ino != (tmp_path / "x.ckpt").stat().st_ino


def test_a_folder_whose_removal_was_cut_is_found_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "x.ckpt", "old")

    def killed(path: str) -> None:
        os.unlink(f"{path}/a")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("lightning_dist.checkpoint.disk.storage.local.shutil.rmtree", killed)
        with pytest.raises(Killed):
            STORAGE.remove(str(tmp_path / "x.ckpt"))
    assert not (tmp_path / "x.ckpt").exists()
    recover(STORAGE, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_removing_nothing_is_no_error(tmp_path: Path) -> None:
    STORAGE.remove(str(tmp_path / "x.ckpt"))
    assert STORAGE.names(str(tmp_path / "x.ckpt")) == []


def test_a_file_that_another_rank_renames_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 that gives up removes the receipts that others are about to publish."""
    staged, published = tmp_path / "staged", tmp_path / "receipt"
    staged.write_bytes(b"of rank 1")
    unlink = os.unlink

    def unlink_late(path: str) -> None:
        staged.rename(published)
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_late)
    STORAGE.remove(str(staged))
    assert published.exists()


def test_bytes_under_a_path(tmp_path: Path) -> None:
    folder(tmp_path / "x.ckpt", "four")
    folder(tmp_path / "x.ckpt" / "nested", "three")
    (tmp_path / "x.ckpt" / "dangling").symlink_to("renamed meanwhile")
    assert STORAGE.tree_nbytes(str(tmp_path / "x.ckpt")) == 2 * 4 + 2 * 5
    assert STORAGE.tree_nbytes(str(tmp_path / "x.ckpt" / "a")) == 4
    assert STORAGE.tree_nbytes(str(tmp_path / "missing")) == 0


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
    missing = type(save.ranges[0])("data/9", 10, -5)  # its memory is not there
    torn = type(save)(save.origin, save.target, (*save.ranges, missing))

    class Cut:
        """A snapshot whose last record_range cannot be read."""

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
