"""``lightning-dist ckpt prune``."""

from __future__ import annotations

import errno
import fcntl
import os
import zipfile
from pathlib import Path

import pytest
import torch
from ckpt_calls import LEFTOVER, ckpt, names, refusal, steps
from cli_saves import damage, save_sharded
from folder_owners import owner


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    steps(tmp_path, 3, 1, 2, 4)
    result = ckpt("prune", tmp_path, "--keep", "2", "--yes")
    assert result.exit_code == 0
    assert names(tmp_path) == {"3.ckpt", "4.ckpt"}
    lines = [line.split()[:2] for line in result.stdout.splitlines()]
    assert lines == [
        ["keep", f"{tmp_path}/4.ckpt:"],
        ["keep", f"{tmp_path}/3.ckpt:"],
        ["remove", f"{tmp_path}/2.ckpt:"],
        ["remove", f"{tmp_path}/1.ckpt:"],
        ["removed", "2"],
    ]
    assert ckpt("prune", tmp_path, "--keep", "2").stdout.endswith("nothing to remove\n")


def test_prune_asks(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    for answer in ("n\n", ""):
        result = ckpt("prune", tmp_path, "--keep", "1", stdin=answer)
        assert result.exit_code == 1
        assert "Remove 1 checkpoint?" in result.stdout
        assert names(tmp_path) == {"1.ckpt", "2.ckpt"}
    assert ckpt("prune", tmp_path, "--keep", "1", stdin="y\n").exit_code == 0
    assert names(tmp_path) == {"2.ckpt"}


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    result = ckpt("prune", tmp_path, "--keep", "1", "--dry-run")
    assert result.exit_code == 0
    assert f"remove  {tmp_path}/1.ckpt" in result.stdout
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt"]


def test_leftovers_are_the_next_runs(tmp_path: Path) -> None:
    steps(tmp_path, 1)
    (tmp_path / LEFTOVER).write_bytes(b"half")
    assert ckpt("prune", tmp_path, "--keep", "1", "--yes").exit_code == 0
    assert sorted(os.listdir(tmp_path)) == [LEFTOVER, "1.ckpt"], "no lock file stays either"


def test_prune_continues_without_locks_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(tmp_path, 1, 2)
    (tmp_path / LEFTOVER).write_bytes(b"half")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert "--no-lock" in refusal("prune", tmp_path, "--keep", "1", "--yes")
    result = ckpt("prune", tmp_path, "--keep", "1", "--no-lock", stdin="y\n")
    assert "no locks here" in result.stdout
    assert sorted(os.listdir(tmp_path)) == [LEFTOVER, "2.ckpt"]


def test_damaged_ones_do_not_count_and_stay(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3)
    save_sharded(tmp_path / "4.ckpt", step=4)
    damage(tmp_path / "3.ckpt")
    (tmp_path / "4.ckpt" / "manifest.json").unlink()
    result = ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert result.exit_code == 0
    assert names(tmp_path) == {"2.ckpt", "3.ckpt", "4.ckpt"}
    assert "has changed since it was written" in result.stdout
    assert "has no manifest.json" in result.stdout


def test_what_others_wrote_stays(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    torch.save({}, tmp_path / "foreign.ckpt")
    (tmp_path / "legacy.ckpt").write_bytes(b"\x80\x02not a zip file")
    (tmp_path / "fsdp.ckpt").mkdir()
    (tmp_path / "fsdp.ckpt" / "meta.pt").write_bytes(b"")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text('{"start_url": "/"}')
    (tmp_path / "dangling.ckpt").symlink_to("nowhere")
    (tmp_path / "notes.txt").write_text("")
    others = names(tmp_path) - {"1.ckpt", "2.ckpt"}
    assert len(others) == 6
    result = ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == others | {"2.ckpt"}
    assert result.stdout.count("leave ") == 5


def test_what_a_newer_version_wrote_stays(tmp_path: Path) -> None:
    steps(tmp_path, 1)
    newer = tmp_path / "newer.ckpt"
    steps(tmp_path, 2)
    with zipfile.ZipFile(tmp_path / "2.ckpt") as old, zipfile.ZipFile(newer, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'"version": 1', b'"version": 2'))
    result = ckpt("prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == {"2.ckpt", "newer.ckpt"}
    assert "written by a newer lightning_dist" in result.stdout


@pytest.mark.parametrize("arguments", [("--yes",), ("--dry-run",)], ids=str)
@pytest.mark.parametrize("calls", [("own",), ("own", "own_as_writer")], ids=str)
def test_prune_refuses_while_somebody_writes(
    tmp_path: Path, arguments: tuple[str, ...], calls: tuple[str, ...]
) -> None:
    steps(tmp_path, 1, 2)
    with owner(tmp_path, *calls) as other:
        said = refusal("prune", tmp_path, "--keep", "1", *arguments)
        assert said.startswith(f"{tmp_path} is in use by ")
        assert f"process {other.pid} on " in said
        assert names(tmp_path) == {"1.ckpt", "2.ckpt"}
    assert ckpt("prune", tmp_path, "--keep", "1", *arguments).exit_code == 0


@pytest.mark.parametrize("keep", ["0", "-1", "two"])
def test_keep_is_at_least_one(tmp_path: Path, keep: str) -> None:
    steps(tmp_path, 1)
    result = ckpt("prune", tmp_path, f"--keep={keep}", "--yes")
    assert result.exit_code == 2
    assert "--keep" in result.stderr
    assert names(tmp_path) == {"1.ckpt"}


def test_keep_has_no_default(tmp_path: Path) -> None:
    assert ckpt("prune", tmp_path, "--yes").exit_code == 2
