"""Which checkpoint of a folder training goes on from, and which are removed."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from checkpointers import held_copies
from snapshots import damage, folder_saves, origin, small_state, trained, write_file, write_folder

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk import format as manifests
from lightning_dist.checkpoint.disk import scan
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Failed
from lightning_dist.checkpoint.disk.scan import Description, checkpoints, newest_valid, verify
from lightning_dist.checkpoint.writer_queue import Removals
from lightning_dist.settings.run import CheckpointSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four checkpoints; their names and times of writing are in another order than their steps."""
    write_file(tmp_path / "z.ckpt", small_state(1), origin(1))
    write_file(tmp_path / "a.ckpt", small_state(4), origin(4))
    write_folder(folder_saves(tmp_path / "b.ckpt", small_state(3), 1, step=3))
    write_file(tmp_path / "c.ckpt", small_state(2), origin(2))
    return tmp_path


def steps(folder: Path) -> list[int]:
    found = [f.description.origin for f in checkpoints(str(folder)) if f.description]
    return [origin.step for origin in found if origin]


def newest(folder: Path) -> str:
    """The name of the checkpoint from which training would go on."""
    found = newest_valid(str(folder))
    assert found is not None
    return Path(found.path).name


def test_the_newest_comes_first(folder: Path) -> None:
    assert steps(folder) == [4, 3, 2, 1]
    found = newest_valid(str(folder))
    assert found is not None
    assert (found.path, found.origin) == (f"{folder}/a.ckpt", origin(4))


def test_broken_ones_are_passed_over_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = (folder / "a.ckpt").read_bytes()
    (folder / "a.ckpt").write_bytes(data[: len(data) // 2])
    (shard,) = (folder / "b.ckpt").glob("*.bin")
    damage(shard)
    with caplog.at_level(logging.WARNING):
        assert newest(folder) == "c.ckpt"
    assert [r.levelname for r in caplog.records if "Skipping" in r.message] == ["WARNING"] * 2
    assert f"{folder}/a.ckpt" in caplog.text
    assert f"{shard.name} has changed since it was written" in caplog.text


def test_nothing_is_left_if_all_are_broken(folder: Path) -> None:
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"None of the checkpoints .* is complete: .*z\.ckpt"):
        newest_valid(str(folder))
    assert steps(folder) == []
    assert len(checkpoints(str(folder))) == 4
    assert all(found.problem for found in checkpoints(str(folder)))


def test_what_is_foreign_is_listed_but_never_chosen(tmp_path: Path) -> None:
    torch.save(small_state(), tmp_path / "foreign.ckpt")
    (tmp_path / "notes.ckpt").write_text("not a checkpoint")
    (tmp_path / "events.out").write_text("a log")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".a.ckpt.tmp-0123456789abcdef").write_text("staged")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert [Path(found.path).name for found in checkpoints(str(tmp_path))] == [
        "foreign.ckpt", "notes.ckpt",
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match="notes"):  # it may have been the newest
        newest_valid(str(tmp_path))
    write_file(tmp_path / "ours.ckpt", small_state(), origin(1))
    assert newest(tmp_path) == "ours.ckpt"
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_with_a_manifest_counts_whatever_its_name(tmp_path: Path) -> None:
    write_folder(folder_saves(tmp_path / "checkpoint_3", small_state(3), 2, step=3))
    assert steps(tmp_path) == [3]


def test_a_newer_format_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "VERSION", 2)
        write_file(folder / "new.ckpt", small_state(9), origin(9))
    assert newest(folder) == "a.ckpt"
    assert ["newer lightning_dist" in f.problem for f in checkpoints(str(folder)) if f.problem] == [
        True
    ]


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    assert newest_valid(str(tmp_path)) is None
    assert newest_valid(f"{tmp_path}/missing") is None


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path) -> None:
    write_file(tmp_path / "whole.ckpt", small_state(), origin(1))
    write_file(tmp_path / "weights.ckpt", small_state(), replace(origin(2), resumable=False))
    assert newest(tmp_path) == "whole.ckpt"


def test_headers_have_to_do_where_nothing_is_checked(tmp_path: Path) -> None:
    write_file(tmp_path / "a.ckpt", small_state(), origin(1))
    content = bytearray((tmp_path / "a.ckpt").read_bytes())
    content[content.index(small_state()["weight"].numpy().tobytes())] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError):
        newest_valid(str(tmp_path))
    assert newest_valid(str(tmp_path), check=False) is not None


@pytest.mark.parametrize(("look", "older"), [("verify", [3]), ("describe", [])])
def test_what_a_writer_replaces_meanwhile_is_no_damage(
    look: str,
    older: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That of a trainer that was killed may still work, and readers take no lock."""
    usual, newest_one = getattr(scan, look), tmp_path / "a.ckpt"
    for step in (*older, 4):
        write_file(newest_one if step == 4 else tmp_path / "b.ckpt", small_state(), origin(step))

    def replaced_first(path: str, **how: Any) -> Description:
        if newest_one.exists():  # removed once the next is there
            write_file(tmp_path / "next.ckpt", small_state(), origin(5))
            newest_one.unlink()
        return usual(path, **how)

    monkeypatch.setattr(scan, look, replaced_first)
    assert newest(tmp_path) == "next.ckpt"
    assert not caplog.records


def test_what_takes_the_place_of_all_damaged_ones_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_file(tmp_path / "a.ckpt", small_state(), origin(1))
    damage(tmp_path / "a.ckpt")

    def slow(path: str) -> Description:
        write_file(tmp_path / "b.ckpt", small_state(), origin(2))
        return verify(path)

    monkeypatch.setattr(scan, "verify", slow)
    assert newest(tmp_path) == "b.ckpt"
    assert not caplog.records, "it is not the newest any more"


Kind = Literal["process", "thread"]
LIMIT = 30.0


class Run:
    """A training that saves its only checkpoint under names of one letter."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, writer: Kind) -> None:
        self.model, optimizer = trained()
        self.folder, self._patch = folder, patch
        self.checkpointer = Checkpointer(CheckpointSettings(writer=writer))
        self.checkpointer.open(str(folder))
        self.checkpointer.watch([optimizer])

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}.ckpt"

    def save(self, name: str, *, torn: bool = False) -> list[object]:
        """What became of it."""
        with held_copies(self._patch) as held:
            self.checkpointer.save(self.model.state_dict(), self.path(name), step=1)
            if torn:
                assert held.begun.wait(LIMIT)
                with torch.no_grad():
                    self.model[0].weight.add_(1)
        self.checkpointer.wait(LIMIT)
        return list(self.checkpointer.poll())

    def names(self) -> list[str]:
        self.checkpointer.wait(LIMIT)
        return sorted(name[0] for name in os.listdir(self.folder) if name.endswith(".ckpt"))


@pytest.fixture(params=["process", "thread"])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    made = Run(tmp_path, monkeypatch, writer=request.param)
    yield made
    made.checkpointer.close(LIMIT)


def test_a_dropped_save_keeps_what_it_would_have_replaced(run: Run) -> None:
    run.save("a")
    (event,) = run.save("b", torn=True)
    assert isinstance(event, Failed)
    assert event.dropped
    run.checkpointer.remove(run.path("a"))
    run.checkpointer.link(run.path("b"), run.path("l"))
    assert run.names() == ["a"]
    assert run.checkpointer.poll() == [], "the link to nothing is no second failure"
    run.save("c")
    assert run.names() == ["c"]


def test_a_removal_that_waits_can_be_taken_back(run: Run) -> None:
    run.save("a")
    run.save("b", torn=True)
    run.checkpointer.remove(run.path("a"))
    run.checkpointer.keep(run.path("a"))
    run.save("c")
    assert run.names() == ["a", "c"]


def test_links_under_way_have_their_names(run: Run) -> None:
    with held_copies(run._patch) as held:
        run.checkpointer.save(run.model.state_dict(), run.path("a"), step=1)
        run.checkpointer.link(run.path("a"), run.path("l"))
        assert held.begun.wait(LIMIT)
        assert run.checkpointer.is_pending(run.path("l"))
    run.checkpointer.wait(LIMIT)
    assert not run.checkpointer.is_pending(run.path("l"))
    assert run.names() == ["a", "l"]


def test_what_a_lost_writer_was_asked_for_is_asked_again_once() -> None:
    removals = Removals()
    for path in ("done", "waits", "open", "kept"):
        removals.ask(path)
    removals.answered("done", waits=False)
    removals.answered("waits", waits=True)
    removals.lost()
    removals.cancel("kept")
    assert removals.take_again() == ["waits", "open"]
    assert removals.take_again() == []
    removals.succeeded()
    removals.lost()
    assert removals.take_again() == ["open"], "a success did what waited"
