"""The order of a writer's jobs: nothing is removed before something newer is safe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshots import assert_equal, file_save, folder_saves, origin, small_state
from stores import FaultyStorage, broken_disk

from lightning_dist.checkpoint.disk.jobs import Committed, Done, Event, Failed, Link, Remove
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.reading import load


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
    assert isinstance(writer.save("a"), Committed)
    assert isinstance(writer.save("b"), Committed)
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


def test_events_tell_bytes_and_origin(writer: Scripted) -> None:
    event = writer.save("a", 7)
    assert isinstance(event, Committed)
    assert event.origin == origin(7)
    assert event.target == f"{writer.folder}/a"
    assert event.nbytes == (writer.folder / "a").stat().st_size


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
