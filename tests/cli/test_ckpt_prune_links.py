"""``lightning-dist ckpt prune`` and what has several names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from ckpt_calls import ckpt, names, steps
from cli_saves import save_file, save_sharded

from lightning_dist.checkpoint.disk.storage import storage_of


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_last_is_linked_to_stays(tmp_path: Path, symbolic: bool, sharded: bool) -> None:
    save = save_sharded if sharded else save_file
    for step in (1, 2, 3, 4):
        save(tmp_path / f"{step}.ckpt", step=step)
    storage, inside = storage_of(str(tmp_path))
    storage.link(f"{inside}/2.ckpt", f"{inside}/last.ckpt", symbolic=symbolic)
    ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == {"4.ckpt", "2.ckpt", "last.ckpt"}
    assert ckpt("verify", tmp_path).exit_code == 0


def test_links_of_one_save_count_once_and_are_not_removed(tmp_path: Path) -> None:
    """The run did not write them, so somebody wants them."""
    steps(tmp_path, 1, 2, 3)
    for source, target in (("3", "last"), ("2", "second"), ("1", "first")):
        os.link(tmp_path / f"{source}.ckpt", tmp_path / f"{target}.ckpt")
    result = ckpt("prune", tmp_path, "--keep", "2", "--yes")
    assert names(tmp_path) == {"3.ckpt", "last.ckpt", "2.ckpt", "second.ckpt", "first.ckpt"}
    assert "first.ckpt: step 1" in result.stdout
    assert "saved as '1.ckpt'; this is a copy or a link" in result.stdout


@pytest.mark.parametrize("whole", [True, False])
def test_copies_that_a_user_made_stay(tmp_path: Path, whole: bool) -> None:
    steps(tmp_path, 1, 2, 3)
    shutil.copy(tmp_path / "1.ckpt", tmp_path / "teacher.ckpt")
    (tmp_path / "1.ckpt").unlink()
    save_sharded(tmp_path / "4.ckpt", step=4)
    shutil.copytree(tmp_path / "4.ckpt", tmp_path / "other.ckpt")
    if not whole:
        os.truncate(tmp_path / "teacher.ckpt", 500)
        manifest = tmp_path / "other.ckpt" / "manifest.json"
        manifest.write_text(manifest.read_text()[:-1])
    ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == {"4.ckpt", "other.ckpt", "teacher.ckpt"}


def test_what_a_link_of_a_user_points_to_stays(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3)
    (tmp_path / "paper.ckpt").symlink_to("1.ckpt")
    ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == {"3.ckpt", "1.ckpt", "paper.ckpt"}


def test_last_of_a_save_of_its_own_does_not_count(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    save_file(tmp_path / "last.ckpt", step=3)
    ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == {"last.ckpt", "2.ckpt"}


def test_a_damaged_last_stays_and_so_does_what_it_points_to(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    os.truncate(tmp_path / "2.ckpt", 500)  # not even its headers can be read
    (tmp_path / "last.ckpt").symlink_to("2.ckpt")
    ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == {"1.ckpt", "2.ckpt", "last.ckpt"}
