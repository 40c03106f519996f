"""One trainer per folder, and what a dead one leaves is cleared away."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from checkpointers import opened
from folder_owners import owner
from processes import run, run_together
from snapshots import assert_equal, folder_saves, origin, small_state, write_file, write_folder

from lightning_dist.checkpoint.disk import folder_owner as file_lock
from lightning_dist.checkpoint.disk.folder_owner import (
    LOCK,
    Lock,
    forget,
    is_fuse,
    is_owned,
    own,
    owner_of,
)
from lightning_dist.checkpoint.disk.scan import recover
from lightning_dist.checkpoint.disk.storage import LocalStorage
from lightning_dist.checkpoint.reading import load

STORAGE = LocalStorage()


@contextmanager
def owned(folder: Path, **patience: float) -> Iterator[Lock]:
    """This process owns the folder meanwhile."""
    lock = own(str(folder), **patience)
    assert lock is not None
    yield lock
    lock.release()


def is_owned_by_me(folder: Path) -> bool:
    owner = owner_of(str(folder))
    return owner is not None and owner.pid == os.getpid() and not owner.ended


def test_another_process_is_refused_with_the_name_of_the_owner(tmp_path: Path) -> None:
    with owner(tmp_path, "own") as other:
        with pytest.raises(ValueError, match="Only one trainer may write") as error:
            own(str(tmp_path))
        assert f"process {other.pid} on {socket.gethostname()}" in str(error.value)
        assert "another dirpath" in str(error.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_owner_is_free(tmp_path: Path, number: int) -> None:
    with owner(tmp_path, "own") as other:
        other.send_signal(number)
        other.wait(20)
        with owned(tmp_path):
            assert f'"pid": {os.getpid()}}}' in (tmp_path / LOCK).read_text()


def test_a_successor_waits_for_the_end_of_the_owner(tmp_path: Path) -> None:
    """A leader that was evicted is still there when the next one opens the folder."""
    with owner(tmp_path, "own") as other, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(own, str(tmp_path), trainer_patience=60.0)
        with pytest.raises(TimeoutError):
            waits.result(0.1)
        other.kill()
        lock = waits.result(60)
    assert lock is not None
    assert f'"pid": {os.getpid()}}}' in (tmp_path / LOCK).read_text()
    lock.release()


def test_the_writer_of_a_dead_trainer_is_waited_for(tmp_path: Path) -> None:
    with owner(tmp_path, "own_as_writer") as writer:
        with pytest.raises(ValueError, match=r"still holds .* has written nothing for 0 s"):
            own(str(tmp_path), patience=0.1)
        assert writer.stdin is not None
        writer.stdin.close()  # it has finished
        with owned(tmp_path):
            pass


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="File exists"):
        own(f"{tmp_path}/file")


NUMBER = "0123456789abcdef"
FOREIGN = {
    *("notes.txt", ".hidden", "a.ckpt", "a.ckpt.tmp", f"a.ckpt.tmp-{NUMBER}", "a.ckpt.tmp-0123"),
    *(".a.ckpt", ".a.ckpt.tmp", ".a.ckpt.tmp-0123", ".a.ckpt.tmp-0123456789abcdeg"),
    *(f".a.ckpt.tmp-{NUMBER.upper()}", f".a.ckpt.tmp-{NUMBER}0", f".a.ckpt.tmp-{NUMBER}\n"),
    *(f".tmp-{NUMBER}", f"..tmp-{NUMBER}", f".a.ckpt.TMP-{NUMBER}", f".a.ckpt.tmp.{NUMBER}"),
    *(f".a.ckpt.new-{NUMBER}", f".a.ckpt-tmp-{NUMBER}", f".a.ckpt.xtmp-{NUMBER}"),
}


@pytest.mark.parametrize("folders", [False, True])
def test_only_leftovers_are_removed(folders: bool, tmp_path: Path) -> None:
    """They have a dot, a name, the kind, and 16 hexadecimal digits."""
    ours = {f".x y.ckpt.{kind}-{NUMBER}" for kind in ("tmp", "trash")}
    for name in FOREIGN | ours:
        path = tmp_path / name
        if folders:
            path.mkdir()
        (path / "file" if folders else path).write_text(name)
    assert {Path(path).name for path in STORAGE.leftovers(str(tmp_path))} == ours
    recover(STORAGE, str(tmp_path))
    assert set(os.listdir(tmp_path)) == FOREIGN


def test_a_complete_folder_without_its_name_gets_it(tmp_path: Path) -> None:
    staged = STORAGE.staging(f"{tmp_path}/x.ckpt", origin().save_id)
    write_folder(folder_saves(tmp_path / "elsewhere", small_state(), 2))
    os.rename(tmp_path / "elsewhere", staged)
    with owned(tmp_path):
        pass
    assert_equal(load(f"{tmp_path}/x.ckpt"), small_state())
    assert os.listdir(tmp_path) == ["x.ckpt"]


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


def is_refused(folder: Path) -> bool:
    """Whether another process may not become the trainer of ``folder`` now."""
    asked = run([sys.executable, "-c", ASK, folder], limit=30)
    assert asked.returncode in (0, 3), asked.output
    return asked.returncode == 3


ASK = """
import sys
from lightning_dist.checkpoint.disk.folder_owner import own
try:
    own(sys.argv[1]).release()
except ValueError:
    sys.exit(3)
"""


def test_reading_the_lock_file_in_the_trainer_keeps_the_lock(tmp_path: Path) -> None:
    """As shutil.copytree and trackers that pack the folder do."""
    folder = tmp_path / "checkpoints"
    with owned(folder):
        shutil.copytree(folder, tmp_path / "copy")
        assert is_refused(folder)
        assert is_owned_by_me(folder)
    assert not is_refused(folder)


FORKS = """
import os, sys
from lightning_dist.checkpoint.disk.folder_owner import own
lock = own(sys.argv[1])
if os.fork() == 0:  # as a data loader is
    if sys.argv[2] == "release":
        lock.release()  # what it has inherited is not its own
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("child_does", ["release", "nothing"])
def test_a_process_that_the_trainer_has_forked_does_not_keep_the_lock(
    tmp_path: Path, child_does: str
) -> None:
    command = [sys.executable, "-c", FORKS, tmp_path, child_does]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        assert is_refused(tmp_path), "the child gave the lock of its parent away"
        trainer.kill()
        assert trainer.wait(20) == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        assert not is_refused(tmp_path)
        trainer.stdin.close()


def test_no_lock_file_is_left_when_the_last_owner_has_ended(tmp_path: Path) -> None:
    with owned(tmp_path):
        with owned(tmp_path):
            pass
        assert is_refused(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_lock_file_stays_while_a_writer_needs_it(tmp_path: Path) -> None:
    """A trainer and its own writer do not wait for each other."""
    with ExitStack() as writer:
        with owned(tmp_path):
            writer.enter_context(owner(tmp_path, "own_as_writer"))
        assert os.listdir(tmp_path) == [LOCK]
    forget(str(tmp_path))
    assert os.listdir(tmp_path) == []


OWN_AGAIN_AND_AGAIN = """
import os, sys
from lightning_dist.checkpoint.disk.folder_owner import own
folder, owned = sys.argv[1], 0
while owned < 40:
    try:
        lock = own(folder)
    except ValueError:
        continue
    alone = os.open(f"{folder}/alone", os.O_CREAT | os.O_EXCL)  # fails if somebody else owns it
    os.unlink(f"{folder}/alone")
    os.close(alone)
    lock.release()
    owned += 1
"""


def test_owners_that_come_and_go_are_never_two_and_leave_nothing(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", OWN_AGAIN_AND_AGAIN, tmp_path]] * 3
    for finished in run_together(commands, [{}] * 3, limit=60):
        finished.require_success()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A file system that has none, and says so."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)


@pytest.mark.parametrize(
    "without_locks", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], indirect=True
)
def test_without_locks_it_is_refused_with_the_setting_with_which_a_user_can_go_on(
    tmp_path: Path, without_locks: None
) -> None:
    with pytest.raises(ValueError, match=r"has no file locks .* set lock=False"):
        own(str(tmp_path))
    assert owner_of(str(tmp_path)) is None
    assert not os.listdir(tmp_path)
    leftover = tmp_path / ".x.ckpt.tmp-0123456789abcdef"
    leftover.touch()  # perhaps of a writer that is alive: nobody can say
    with opened(tmp_path, lock=False) as checkpointer:
        assert is_owned(str(tmp_path)), "other ranks see that rank 0 writes here"
        checkpointer.save(small_state(), f"{tmp_path}/1.ckpt", step=1)
    assert_equal(load(f"{tmp_path}/1.ckpt"), small_state())
    assert sorted(os.listdir(tmp_path)) == [leftover.name, "1.ckpt"]


MOUNTS = """\
22 1 0:20 / / rw - ext4 /dev/vda rw
35 22 0:44 / /mnt/jfs rw,relatime shared:17 - fuse.juicefs JuiceFS:x rw,user_id=0
36 22 0:45 / /mnt/with\\040space rw - fuse.x x rw
"""


def test_a_fuse_mount_has_locks_of_the_process() -> None:
    """FUSE tells its server of no unlocking when a killed process had another kind of lock."""
    assert is_fuse(os.makedev(0, 44), MOUNTS)
    assert is_fuse(os.makedev(0, 45), MOUNTS)
    assert not is_fuse(os.makedev(0, 20), MOUNTS)
    assert not is_fuse(os.makedev(9, 9), MOUNTS)


def test_locks_of_the_process_are_kept_when_its_writer_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "is_fuse", lambda *_: True)
    with opened(tmp_path):
        asked = run([sys.executable, "-c", ASK_BYTES, tmp_path], limit=60).require_success()
        assert asked.output.split() == ["True", "True", "True"], "trainer, writer, cleaned up"
    assert os.listdir(tmp_path) == []


ASK_BYTES = """
import sys
from lightning_dist.checkpoint.disk.folder_owner import _holders
print(*_holders(sys.argv[1])[:3])
"""
