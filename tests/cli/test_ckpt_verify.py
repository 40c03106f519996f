"""``lightning-dist ckpt verify``."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from ckpt_calls import ckpt, listed, refusal
from cli_saves import damage, save_file, save_sharded
from hypothesis import given
from hypothesis import strategies as st


def test_verify_says_ok_line_by_line(mixed: Path) -> None:
    (mixed / "cut.ckpt").unlink()
    result = ckpt("verify", mixed)
    assert result.exit_code == 0
    found = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in found] == ["ok"] * 4
    assert found[1][1:] == f"{mixed}/b.ckpt: step 20, sharded, 2.1 kB".split()


@pytest.mark.parametrize("kind", ["single", "sharded", "folder", "torch.save"])
def test_verify_finds_a_changed_bit_in_every_kind(mixed: Path, kind: str) -> None:
    (path,) = [Path(str(each["path"])) for each in listed(mixed).values() if each["kind"] == kind]
    inside = sorted(p for p in path.iterdir() if "manifest" not in p.name) if path.is_dir() else []
    assert ckpt("verify", path).exit_code == 0
    at = None
    if kind == "torch.save":
        with zipfile.ZipFile(path) as archive:
            at = archive.getinfo("foreign/data.pkl").header_offset + 100
    damage(inside[-1] if inside else path, at=at)
    result = ckpt("verify", path)
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"PROBLEM {path}: is not a complete checkpoint: ")
    assert "changed" in line or "damaged" in line
    if inside:
        assert inside[-1].name in line


def test_verify_takes_several_and_reads_them_all(mixed: Path) -> None:
    result = ckpt("verify", mixed / "cut.ckpt", mixed / "a.ckpt", "--json")
    assert result.exit_code == 1
    problems = [each["problem"] for each in json.loads(result.stdout)["checkpoints"]]
    assert problems[0] is not None
    assert problems[1] is None


def test_verify_sees_what_ls_cannot(mixed: Path) -> None:
    damage(mixed / "a.ckpt")
    assert listed(mixed)["a.ckpt"]["problem"] is None
    assert ckpt("verify", mixed / "a.ckpt").exit_code == 1


def test_verify_of_shards_without_their_manifest(tmp_path: Path) -> None:
    save_sharded(tmp_path / "x")
    (tmp_path / "x" / "manifest.json").unlink()
    result = ckpt("verify", tmp_path / "x")
    assert result.exit_code == 1
    assert "has no manifest.json" in result.stdout


def test_verify_refuses_what_is_not_there(mixed: Path, tmp_path: Path) -> None:
    said = refusal("verify", mixed / "a.ckpt", mixed / "no.ckpt")
    assert said == (
        f"There is no checkpoint or folder at {mixed}/no.ckpt; lightning-dist ckpt ls DIR lists "
        "the checkpoints of a folder"
    )
    (tmp_path / "empty").mkdir()
    assert refusal("verify", tmp_path / "empty").startswith("There are no checkpoints in ")


@given(st.integers(0, 10_000))
def test_verify_finds_any_changed_bit(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    path = Path(save_file(tmp_path_factory.mktemp("bit") / "x.ckpt"))
    damage(path, at=at % path.stat().st_size)
    assert ckpt("verify", path).exit_code == 1
