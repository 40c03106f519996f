"""Which files a start removes: those that its own run wrote, and no others."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import flip
from elastic_runs import FailAt, Fault, Numbered, fit, make_loader
from loop_runs import train
from scenarios.accelerating import saving

from lightning_dist.checkpoint.disk import scan
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.scan import verify


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix == ".ckpt"}


def striking(step: int) -> Any:
    def strike(at: str, steps: int) -> None:
        if (at, steps) == ("after_step", step):
            raise Fault

    return strike


def loop_until(folder: Path, step: int) -> None:
    with pytest.raises(Fault):
        train(folder, "plain", strike=striking(step))


def fit_until(folder: Path, step: int) -> None:
    with pytest.raises(Fault):
        fit(folder, FailAt("on_train_batch_end", step), validate=False)


UNTIL = {"ElasticLoop": loop_until, "ElasticRestart": fit_until}
FINISH = {
    "ElasticLoop": lambda folder: train(folder, "plain"),
    "ElasticRestart": lambda folder: fit(folder, validate=False),
}
OTHER = {"sampler": range(40), "shuffle": None}
KINDS = pytest.mark.parametrize(
    "kind", [pytest.param("ElasticLoop", marks=pytest.mark.slow), "ElasticRestart"]
)


@KINDS
def test_keep_holds_over_any_number_of_restarts(tmp_path: Path, kind: str) -> None:
    for step in (5, 11, 17):
        UNTIL[kind](tmp_path, step)
        assert len(names(tmp_path / "ckpt")) == 2
    FINISH[kind](tmp_path)
    left = {name.split("-")[1] for name in names(tmp_path / "ckpt")}
    assert left == {"step=34.ckpt", "step=36.ckpt"}


@KINDS
def test_what_users_put_into_the_folder_stays(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run" / "ckpt"
    UNTIL[kind](tmp_path / "other", 9)
    UNTIL[kind](tmp_path / "run", 5)
    torch.save({"weights": torch.ones(3)}, folder / "foreign.ckpt")
    for name in names(folder):
        shutil.copy(folder / name, folder / f"best-{name}")
    of_other = names(tmp_path / "other" / "ckpt")  # another run, which gave them these names
    for name in of_other:
        shutil.copy(tmp_path / "other" / "ckpt" / name, folder / name)
    os.utime(folder / "foreign.ckpt", (0, 0))
    theirs = {
        path.name: path.read_bytes()
        for path in folder.glob("*.ckpt")
        if path.name.startswith(("best-", "foreign")) or path.name in of_other
    }
    assert len(theirs) >= 5
    FINISH[kind](tmp_path / "run")
    assert {name: (folder / name).read_bytes() for name in theirs} == theirs


@KINDS
def test_what_a_killed_trainer_had_no_time_to_remove_goes(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "ckpt"
    UNTIL[kind](tmp_path, 5)
    spared = tmp_path / "spared"
    shutil.copytree(folder, spared)
    UNTIL[kind](tmp_path, 13)
    for name in names(spared):
        shutil.copy(spared / name, folder / name)
    assert len(names(folder)) == 4
    FINISH[kind](tmp_path)
    assert len(names(folder)) == 2


@KINDS
def test_a_damaged_newest_does_not_count_for_keep(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "ckpt"
    UNTIL[kind](tmp_path, 9)
    (newest,) = folder.glob("*step=8.ckpt")
    flip(newest)
    UNTIL[kind](tmp_path, 9)
    found = [verify(str(folder / name)).origin for name in names(folder)]
    assert {origin.step for origin in found if origin} == {6, 8}
    assert len(found) == 2


@KINDS
def test_a_start_that_saves_nothing_removes_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest could not be read, once: it is passed over, and there when it can be again."""
    UNTIL[kind](tmp_path, 9)
    before = names(tmp_path / "ckpt")

    def unreadable(path: str, *args: Any, **kwargs: Any) -> Any:
        if "step=8" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return verify(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(scan, "verify", unreadable)
        UNTIL[kind](tmp_path, 7)  # from step 6, and no further than before the next checkpoint
    assert names(tmp_path / "ckpt") == before


def test_total_limit_counts_and_removes_own_checkpoints_only(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_0").mkdir(parents=True)
    (folder / "checkpoint_0" / "mine.txt").write_text("no checkpoint of AsyncStateCheckpointer")
    with saving(tmp_path, total_limit=2, writer="thread") as (state, _):
        state.save_state()
        state.wait()
        shutil.copytree(folder / "checkpoint_1", folder / "checkpoint_2")
        saved = [os.path.basename(state.save_state()) for _ in range(3)]
        state.wait()
    assert saved == ["checkpoint_3", "checkpoint_4", "checkpoint_5"]
    left = {path.name for path in folder.iterdir() if path.name.startswith("checkpoint")}
    assert left == {"checkpoint_0", "checkpoint_2", "checkpoint_4", "checkpoint_5"}


def test_async_state_does_not_replace_a_copy(tmp_path: Path) -> None:
    with saving(None, writer="thread") as (state, _):
        state.save_state(tmp_path / "saved")
        state.wait()
        shutil.copytree(tmp_path / "saved", tmp_path / "best")
        with pytest.raises(ValueError, match=r"was saved as .saved.*choose another name"):
            state.save_state(tmp_path / "best")
        state.save_state(tmp_path / "saved")
        state.wait()


@KINDS
def test_a_start_that_finds_nothing_whole_removes_nothing(tmp_path: Path, kind: str) -> None:
    UNTIL[kind](tmp_path, 5)
    for path in (tmp_path / "ckpt").glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:-100])
    before = names(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="None of the checkpoints"):
        FINISH[kind](tmp_path)
    assert names(tmp_path / "ckpt") == before


@KINDS
def test_a_folder_of_others_only_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "ckpt").mkdir()
    torch.save({"weights": torch.ones(3)}, tmp_path / "ckpt" / "theirs.ckpt")
    with pytest.raises(ValueError, match=r"theirs.ckpt was not saved under ElasticRestart or"):
        FINISH[kind](tmp_path)
    assert names(tmp_path / "ckpt") == {"theirs.ckpt"}


@KINDS
def test_a_folder_of_another_dataset_is_refused(tmp_path: Path, kind: str) -> None:
    other = {
        "ElasticLoop": lambda: train(tmp_path, "plain", loader=OTHER),
        "ElasticRestart": lambda: fit(tmp_path, loader=lambda: make_loader(Numbered(40))),
    }
    UNTIL[kind](tmp_path, 7)
    with pytest.raises(ValueError, match=r"of another run: its epochs have 48 samples.* has 40"):
        other[kind]()
