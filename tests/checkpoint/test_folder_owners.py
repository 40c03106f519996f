"""One trainer per folder, and what a dead one leaves is cleared away."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from folder_owners import owner
from hypothesis import given
from hypothesis import strategies as st
from snapshots import assert_equal, folder_saves, origin, small_state, write_file, write_folder

from lightning_dist.checkpoint.disk.folder_owner import LOCK, own
from lightning_dist.checkpoint.disk.recovery import recover
from lightning_dist.checkpoint.disk.storage import LocalStorage
from lightning_dist.checkpoint.reading import load

STORAGE = LocalStorage()


def test_another_process_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    with owner(tmp_path, "own") as other:
        with pytest.raises(ValueError, match="only one trainer may write") as error:
            own(str(tmp_path))
        assert f"process {other.pid} on {socket.gethostname()}" in str(error.value)
        assert "another dirpath" in str(error.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_owner_is_free(tmp_path: Path, number: int) -> None:
    with owner(tmp_path, "own") as other:
        other.send_signal(number)
        other.wait(20)
        lock = own(str(tmp_path))
    assert lock is not None
    lock.release()
    assert f'"pid": {os.getpid()}}}' in (tmp_path / LOCK).read_text()


def test_a_lock_that_was_released_is_free_for_others(tmp_path: Path) -> None:
    lock = own(str(tmp_path))
    assert lock is not None
    lock.release()
    with owner(tmp_path, "own"):
        pass


def test_the_writer_of_a_dead_trainer_is_waited_for(tmp_path: Path) -> None:
    with owner(tmp_path, "own_as_writer") as writer:
        with pytest.raises(ValueError, match=r"still holds .* has written nothing for 0 s"):
            own(str(tmp_path), patience=0.1)
        assert writer.stdin is not None
        writer.stdin.close()  # it has finished
        lock = own(str(tmp_path))
    assert lock is not None
    lock.release()


def test_a_trainer_and_its_own_writer_do_not_wait_for_each_other(tmp_path: Path) -> None:
    lock = own(str(tmp_path))
    with owner(tmp_path, "own_as_writer"):
        pass
    assert lock is not None
    lock.release()


def test_object_stores_have_no_locks() -> None:
    assert own("memory://checkpoints") is None


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="File exists"):
        own(f"{tmp_path}/file")


KINDS = ("tmp", "old", "trash")
IDS = st.text("0123456789abcdef", min_size=16, max_size=16)
names = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20),
    st.sampled_from([".", ""]).flatmap(
        lambda dot: st.sampled_from([
            "a.ckpt", "a.ckpt.tmp", "a.ckpt.tmp-0123", "a.ckpt.trash-0123456789abcdeg",
            "a.ckpt.tmp-0123456789ABCDEF", "a.ckpt.tmp-0123456789abcdef0", ".tmp-0123456789abcdef",
            "a.ckpt.tmp-0123456789abcdef\n", "a.ckpt.TMP-0123456789abcdef",
        ]).map(lambda rest: dot + rest)
    ),
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)  # fmt: skip


def is_ours(name: str) -> bool:
    """Written down a second time: a dot, a name, the kind, and 16 lower hexadecimal digits."""
    if not name.startswith("."):
        return False
    kind, dash, number = name.rpartition(".")[2].partition("-")
    digits = len(number) == 16 and all(c in "0123456789abcdef" for c in number)
    return name.rpartition(".")[0] not in ("", ".") and dash and kind in KINDS and digits


@given(st.sets(names, max_size=6), st.sets(IDS, max_size=2), st.booleans())
def test_only_leftovers_are_removed(foreign: set[str], ids: set[str], folders: bool) -> None:
    foreign = {name for name in foreign if not is_ours(name)}
    ours = {f".x y.ckpt.{kind}-{number}" for number in ids for kind in ("tmp", "trash")}
    with TemporaryDirectory() as folder:
        for name in foreign | ours:
            path = Path(folder, name)
            if folders:
                path.mkdir()
            (path / "file" if folders else path).write_text(name)
        assert {Path(path).name for path in STORAGE.leftovers(folder)} == ours
        recover(STORAGE, folder)
        assert set(os.listdir(folder)) == foreign


def test_a_complete_folder_without_its_name_gets_it(tmp_path: Path) -> None:
    staged = STORAGE.staging(f"{tmp_path}/x.ckpt", origin().save_id)
    write_folder(folder_saves(tmp_path / "elsewhere", small_state(), 2))
    os.rename(tmp_path / "elsewhere", staged)
    lock = own(str(tmp_path))
    assert lock is not None
    lock.release()
    assert_equal(load(f"{tmp_path}/x.ckpt"), small_state())
    assert sorted(os.listdir(tmp_path)) == [LOCK, "x.ckpt"]


def test_a_staged_file_is_not_published_and_replaces_nothing(tmp_path: Path) -> None:
    write_file(tmp_path / "x.ckpt", small_state(1))
    for name in ("x.ckpt", "y.ckpt"):
        staged = Path(STORAGE.staging(f"{tmp_path}/{name}", origin(2).save_id))
        write_file(tmp_path / "elsewhere", small_state(2))
        staged.write_bytes((tmp_path / "elsewhere").read_bytes()[:-1])
        (tmp_path / "elsewhere").unlink()
    recover(STORAGE, str(tmp_path))
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert_equal(load(f"{tmp_path}/x.ckpt"), small_state(1))
