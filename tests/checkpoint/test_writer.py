"""A writer: order of its jobs; disks that are full, broken or slow; processes that are killed."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from snapshots import assert_equal, file_save, folder_saves, origin, small_state, write_file
from stores import FaultyStorage, broken_disk

from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Done,
    Event,
    Failed,
    Job,
    Link,
    Remove,
    Save,
)
from lightning_dist.checkpoint.disk.jobs import Remove as Removal
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.reading import load
from lightning_dist.checkpoint.writer_queue import WriterQueue
from lightning_dist.checkpoint.writers import SnapshotMemory
from lightning_dist.settings.run import CheckpointSettings
from tests.campaigns.checkpoint_crash.oracle import PROBLEMS


class Scripted:
    """A writer in a folder whose disk fails while ``broken`` is set."""

    def __init__(self, folder: Path, *, read_back: bool = False) -> None:
        self.folder, self.broken = folder, False
        self.events: list[Event] = []
        self._writer = Writer(
            report=self.events.append,
            read_back=read_back,
            find_storage=FaultyStorage(self._before).find,
        )

    def _before(self, path: str, position: int) -> None:
        if self.broken:
            broken_disk(path, position)

    def save(self, name: str, step: int = 1, *, broken: bool = False) -> Event:
        self.broken = broken
        self._writer.do(*file_save(self.folder / name, small_state(step), origin(step)))
        self.broken = False
        return self.events[-1]

    def remove(self, name: str) -> Event:
        self._writer.do(Remove(f"{self.folder}/{name}"), memoryview(b""))
        return self.events[-1]

    def link(self, source: str, target: str, *, symbolic: bool = False) -> Event:
        job = Link(f"{self.folder}/{source}", f"{self.folder}/{target}", symbolic)
        self._writer.do(job, memoryview(b""))
        return self.events[-1]

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Scripted]:
    return Scripted(tmp_path)


def test_what_was_replaced_is_removed_after_the_success(writer: Scripted) -> None:
    writer.save("a")
    event = writer.save("b", 7)
    nbytes = (writer.folder / "b").stat().st_size
    assert isinstance(event, Committed)
    assert (event.origin, event.target, event.nbytes) == (origin(7), f"{writer.folder}/b", nbytes)
    assert writer.remove("a") == Done(f"{writer.folder}/a")
    assert writer.names() == ["b"]


def test_a_failure_keeps_it_and_the_next_success_removes_it(writer: Scripted) -> None:
    writer.save("a")
    assert isinstance(writer.save("b", broken=True), Failed)
    writer.remove("a")
    assert writer.names() == ["a"]
    writer.save("c", broken=True)
    assert writer.names() == ["a"]
    writer.save("d")
    assert writer.names() == ["d"]


def test_a_save_of_a_pending_deletion_cancels_its_removal(writer: Scripted) -> None:
    writer.save("a")
    writer.save("b", broken=True)
    writer.remove("a")
    writer.save("a", 2)
    assert writer.names() == ["a"]
    assert_equal(load(f"{writer.folder}/a"), small_state(2))


def test_a_failed_save_leaves_what_had_its_name(writer: Scripted) -> None:
    writer.save("a", 1)
    event = writer.save("a", 2, broken=True)
    assert isinstance(event, Failed)
    assert event.reason.startswith("OSError: [Errno 5] Input/output error")
    assert event.origin == origin(2)
    assert writer.names() == ["a"]
    assert_equal(load(f"{writer.folder}/a"), small_state(1))


@pytest.mark.parametrize("symbolic", [True, False])
def test_a_link_shows_what_was_saved_last(writer: Scripted, symbolic: bool) -> None:
    for step in (1, 2):
        writer.save(f"step={step}", step)
        writer.link(f"step={step}", "last", symbolic=symbolic)
        assert_equal(load(f"{writer.folder}/last"), small_state(step))
    assert not isinstance(writer.events[-1], Failed)


def test_a_link_after_a_failure_is_skipped(writer: Scripted) -> None:
    writer.save("a", 1)
    writer.link("a", "last")
    writer.save("b", 2, broken=True)
    assert not isinstance(writer.link("b", "last"), Failed)
    assert_equal(load(f"{writer.folder}/last"), small_state(1))


def test_a_link_to_nothing_is_an_error_and_stops_nothing(writer: Scripted) -> None:
    writer.save("a")
    event = writer.link("gone", "last")
    assert isinstance(event, Failed)
    assert event.origin is None
    assert event.reason.startswith("FileNotFoundError")
    writer.save("b")
    writer.remove("a")
    assert writer.names() == ["b"]


def test_a_removal_that_fails_is_tried_again_and_no_failed_save(
    writer: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.save("a")
    writer.save("b", broken=True)
    writer.remove("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: broken_disk(path, 0))
        writer.save("c", 3)
    assert isinstance(writer.events[-1], Committed)
    assert writer.names() == ["a", "c"]
    writer.link("c", "last")
    assert_equal(load(f"{writer.folder}/last"), small_state(3))
    assert writer.names() == ["c", "last"], "it was not tried again"


def test_files_and_folders_take_each_others_names(tmp_path: Path) -> None:
    events: list[Event] = []
    writer = Writer(report=events.append)
    target = tmp_path / "new folder" / "x.ckpt"
    for step in range(1, 5):
        state = small_state(step)
        save = folder_saves(target, state, 1, step=step)[0] if step % 2 else file_save(
            target, state, origin(step)
        )  # fmt: skip
        writer.do(*save)
        assert_equal(load(str(target)), state)
        assert os.listdir(target.parent) == ["x.ckpt"]
    assert [type(event) for event in events] == [Committed] * 4


def outcome(save: tuple[Save, memoryview], **arguments: Any) -> Event:
    events: list[Event] = []
    Writer(report=events.append, **arguments).do(*save)
    (event,) = events
    return event


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    folder = tmp_path / "small disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.root
@pytest.mark.parametrize("sharded", [False, True])
def test_no_space_is_known_before_anything_is_written(small_disk: Path, sharded: bool) -> None:
    write_file(small_disk / "old.ckpt", small_state())
    large = {"weight": torch.ones(1 << 19)}
    target = small_disk / "new.ckpt"
    event = outcome(folder_saves(target, large, 1)[0] if sharded else file_save(target, large))
    assert isinstance(event, Failed)
    assert event.reason.startswith("no space: needs 2.1 MB beside the checkpoints that are kept")
    assert event.reason.endswith(f"1.0 MB are free in {small_disk}")
    assert os.listdir(small_disk) == ["old.ckpt"]
    assert_equal(load(f"{small_disk}/old.ckpt"), small_state())


@pytest.mark.root
def test_a_disk_that_fills_up_while_writing_is_left_as_it_was(small_disk: Path) -> None:
    """Somebody else takes the space in between."""

    def fill(path: str, position: int) -> None:
        (small_disk / "other").write_bytes(bytes(600_000))

    event = outcome(
        file_save(small_disk / "new.ckpt", {"weight": torch.ones(1 << 17)}),
        find_storage=FaultyStorage(fill).find,
    )
    assert isinstance(event, Failed)
    assert f"[Errno {errno.ENOSPC}]" in event.reason
    assert os.listdir(small_disk) == ["other"]


def test_every_write_may_fail(tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    write_file(target, small_state(1))
    positions: list[int] = []
    new = file_save(target, small_state(2), origin(2))
    probe = FaultyStorage(lambda _, position: positions.append(position))
    outcome(file_save(tmp_path / "probe", small_state(2)), find_storage=probe.find)
    (tmp_path / "probe").unlink()
    for bad in positions:

        def fail(path: str, position: int, bad: int = bad) -> None:
            if position == bad:
                raise OSError(errno.EIO, "Input/output error")

        event = outcome(new, find_storage=FaultyStorage(fail).find)
        assert event == Failed(str(target), origin(2), "OSError: [Errno 5] Input/output error")
        assert os.listdir(tmp_path) == ["x.ckpt"]
        assert_equal(load(str(target)), small_state(1))
    assert len(positions) > 10


def test_an_fsync_that_fails_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    event = outcome(file_save(tmp_path / "x.ckpt", small_state()))
    assert isinstance(event, Failed)
    assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, memoryview(data)[:7]))
    assert isinstance(outcome(file_save(tmp_path / "x.ckpt", small_state())), Committed)
    assert_equal(load(f"{tmp_path}/x.ckpt"), small_state())


@pytest.mark.parametrize("read_back", [True, False])
def test_read_back_finds_what_the_disk_has_changed(
    tmp_path: Path, read_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "x.ckpt", small_state(1))
    write = os.write

    def flipped(file: int, data: memoryview) -> int:
        return write(file, bytes(data).replace(b"\x40\x40", b"\x40\x41"))  # of 3.0

    monkeypatch.setattr(os, "write", flipped)
    event = outcome(file_save(tmp_path / "x.ckpt", small_state(2)), read_back=read_back)
    assert isinstance(event, Failed) == read_back
    if isinstance(event, Failed):
        assert "data/0 has changed since it was written" in event.reason
        assert_equal(load(f"{tmp_path}/x.ckpt"), small_state(1))
    assert os.listdir(tmp_path) == ["x.ckpt"]


class Silent:
    """A writer that takes jobs and says nothing by itself."""

    def own(self, folder: str) -> None:
        pass

    def send(self, job: Job, memory: SnapshotMemory | None) -> None:
        pass

    def close(self, timeout: float | None = None) -> None:
        pass


def test_an_answer_ends_no_operation_of_a_writer_that_is_dying() -> None:
    """Whose end is seen after the next writer has been asked for the same, and has answered."""
    queue = WriterQueue(CheckpointSettings(), failed=print, committed=print)
    dying, following = Silent(), Silent()
    for writer in (dying, following):
        queue.writer = writer
        queue.run(Removal("folder/1.ckpt"))
    queue._report(following, Done("folder/1.ckpt"))
    queue._lost(dying, "killed")
    queue.wait(5)
    queue.close(5)


KINDS = (
    "kill the trainer",
    "kill the writer",
    "kill trainer and writer",
    "slow disk (thread)",
    "stopped writer process",
    "dropped snapshot",
    "damaged on disk",
    "kill before every system call",
    "kill after every system call",
    "power cut, names lost every system call",
    "power cut, names kept every system call",
    "EIO at every system call",
    "ENOSPC for good at every system call",
    "short writes at every system call",
)


@pytest.mark.slow
def test_nothing_is_lost_in_a_small_campaign(tmp_path: Path, quick_python: list[str]) -> None:
    """In a process of its own: the campaign forks, which a process with threads must not."""
    result = tmp_path / "campaign.json"
    options = ["--trials", "10", "--seed", "3", "--every", "150", "--folder", tmp_path]
    for kind in KINDS:
        options += ["--kind", kind]
    run(
        [*quick_python, "-m", "tests.campaigns.checkpoint_crash", *options, "--json", result],
        limit=100,
    ).require_success()
    rows = json.loads(result.read_text())["rows"]
    assert {row["kind"] for row in rows} == set(KINDS)
    for row in rows:
        assert {name: row[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0), row["failures"]
