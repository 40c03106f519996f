"""Disks that are full, broken or slow to take what they are given."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshots import assert_equal, file_save, folder_saves, origin, small_state, write_file
from stores import FaultyStorage

from lightning_dist.checkpoint.disk.jobs import Committed, Event, Failed, Save
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.reading import load


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
