"""Which checkpoints of a run stay, also where saves fail; in one process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.elastic.membership import Membership
from lightning_dist.elastic.retention import Retention


class Kept:
    """The checkpoints of one run, of which the saves of some steps fail."""

    def __init__(self, folder: Path, *, on_error: Any = "warn", **settings: Any) -> None:
        self.folder, self.failing = folder, set[int]()
        self.warned: list[str] = []
        self.committed: list[int] = []
        self.retention = Retention(
            str(folder),
            keep=2,
            settings=CheckpointSettings(writer="thread", on_error=on_error, **settings),
            members=Membership(),
            warn=self.warned.append,
            committed=lambda event: self.committed.append(event.origin.step),
        )
        self.found = self.retention.open()
        self.retention.save_for("run", restricted=False, resumed=self.found)

    def save(self, step: int) -> None:
        path = self.retention.begin(f"{step}.ckpt")
        assert path is not None
        assert self.retention.checkpointer is not None
        self.retention.checkpointer.save({"step": torch.tensor(step)}, path, step=step)
        assert self.retention.is_saved_within(20)

    @property
    def names(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*.ckpt")}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []
    usual = Writer._save

    def save(writer: Writer, job: Any, snapshot: memoryview) -> None:
        if job.origin.step in made[-1].failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(writer, job, snapshot)

    def start(**settings: Any) -> Kept:
        if made:
            made[-1].retention.close(patiently=True)
        made.append(Kept(tmp_path, **settings))
        return made[-1]

    monkeypatch.setattr(Writer, "_save", save)
    yield start
    made[-1].retention.close(patiently=True)


def test_a_save_that_fails_takes_nobodys_place(start: Callable[..., Kept]) -> None:
    kept = start()
    kept.failing = {3, 4}
    for step in range(1, 5):
        kept.save(step)
    assert kept.names == {"1", "2"}
    assert len(kept.warned) == 2
    assert "3.ckpt of step 3 was not written" in kept.warned[0]
    for step, names in ((5, {"2", "5"}), (6, {"5", "6"})):
        kept.save(step)
        assert kept.names == names
    assert kept.committed == [1, 2, 5, 6]


@pytest.mark.parametrize(("next_step", "names"), [(3, {"1", "3"}), (2, {"1", "2"})])
def test_what_was_passed_over_goes_first_and_its_name_is_free(
    next_step: int, names: set[str], start: Callable[..., Kept]
) -> None:
    kept = start()
    for step in range(1, 3):
        kept.save(step)
    content = bytearray((kept.folder / "2.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (kept.folder / "2.ckpt").write_bytes(content)
    again = start()
    assert again.found == str(kept.folder / "1.ckpt")
    again.save(next_step)
    assert again.names == names


def test_a_failure_is_raised_once_by_the_first_caller(start: Callable[..., Kept]) -> None:
    kept = start(on_error="raise")
    kept.failing = {1}
    kept.save(1)
    assert kept.retention.has_failed
    with pytest.raises(CheckpointError, match=r"1.ckpt of step 1 was not written.*none of this"):
        kept.retention.begin("2.ckpt")
    kept.retention.agree_on_failures()
    kept.save(2)
    assert kept.names == {"2"}


def test_a_folder_of_others_is_refused(start: Callable[..., Kept], tmp_path: Path) -> None:
    kept = start()
    torch.save({"weights": torch.ones(2)}, tmp_path / "theirs.ckpt")
    kept.save(1)
    assert start().found == str(tmp_path / "1.ckpt"), "one of ours is there too"
    (tmp_path / "1.ckpt").unlink()
    with pytest.raises(ValueError, match=r"theirs.ckpt was not saved under .* use another folder"):
        start()


def test_a_new_leader_copies_lazily_as_the_one_before(tmp_path: Path) -> None:
    members = Membership()
    members.ranks.leader = 1
    retention = Retention(
        str(tmp_path),
        keep=2,
        settings=CheckpointSettings(writer="thread", snapshot="overlap"),
        members=members,
        warn=print,
        committed=print,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    retention.saves.watch([optimizer])
    assert retention.checkpointer is None
    members.ranks.leader = 0
    retention.move(members, run="run", restricted=False)
    assert retention.checkpointer is not None
    assert retention.checkpointer._snapshots.optimizers == [optimizer]
    retention.close(patiently=True)
