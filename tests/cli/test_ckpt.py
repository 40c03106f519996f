"""``lightning-dist ckpt ls``, ``verify`` and ``consolidate``, on object stores too."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path

import fsspec
import pytest
import torch
from calls import LEFTOVER, ckpt, content, listed, printed, refusal, steps
from cli_saves import RECORDS, damage, records_of, save_file, save_sharded
from folder_owners import owner as owner_of


def test_ls_shows_every_kind_the_newest_first(mixed: Path) -> None:
    """It takes no lock and writes nothing."""
    before = sorted(os.listdir(mixed))
    result = ckpt("ls", mixed)
    assert (result.exit_code, sorted(os.listdir(mixed))) == (0, before)
    head, *rows = [line.split() for line in result.stdout.splitlines()]
    assert head == ["name", "step", "created", "size", "kind", "ranks", "status"]
    assert [row[0] for row in rows] == ["c", "b.ckpt", "a.ckpt", "foreign.ckpt", "cut.ckpt"]
    assert rows[0][-3:] == ["1", "not", "verified"]
    assert rows[0][4:6] == ["12", "bytes"]
    assert rows[1][1] == "20"
    assert rows[1][-3:] == ["3", "not", "verified"]
    assert rows[2][-3:] == ["1", "not", "verified"]
    assert rows[3][-3:] == ["torch.save", "not", "verified"]
    assert "is not a complete checkpoint: its end is missing" in " ".join(rows[4])
    assert str(mixed) not in result.stdout


def test_ls_does_not_say_ok_of_what_it_has_not_read(tmp_path: Path) -> None:
    steps(tmp_path, 1)
    damage(tmp_path / "1.ckpt")
    assert "ok" not in ckpt("ls", tmp_path).stdout.split()
    assert listed(tmp_path)["1.ckpt"]["problem"] is None
    result = ckpt("verify", tmp_path, "--json")
    (verdict,) = json.loads(result.stdout)["checkpoints"]
    assert (result.exit_code, verdict["verified"]) == (1, True)
    assert verdict["problem"] is not None


def test_times_are_local(mixed: Path) -> None:
    for zone, expected in (("UTC", "2020-01-01 00:00:10"), ("XYZ-5", "2020-01-01 05:00:10")):
        os.environ["TZ"] = zone  # the fixture of all tests puts the environment back
        time.tzset()
        (row,) = [line for line in ckpt("ls", mixed).stdout.splitlines() if "a.ckpt" in line]
        assert expected in row
    del os.environ["TZ"]
    time.tzset()


def test_ls_for_programs(mixed: Path) -> None:
    found = listed(mixed)
    assert found["b.ckpt"] == {
        "name": "b.ckpt",
        "path": f"{mixed}/b.ckpt",
        "kind": "sharded",
        "nbytes": sum(map(len, RECORDS.values())),
        "step": 20,
        "created": found["b.ckpt"]["created"],
        "ranks": 3,
        "problem": None,
        "verified": False,
    }
    assert str(found["b.ckpt"]["created"]).startswith(("2020-01-01T", "2019-12-31T"))
    assert found["foreign.ckpt"]["step"] is None
    assert "not a complete checkpoint" in str(found["cut.ckpt"]["problem"])
    assert (content(mixed)["owner"], content(mixed)["leftovers"]) == (None, [])


def test_ls_names_leftovers_and_who_writes(mixed: Path) -> None:
    (mixed / LEFTOVER).write_bytes(b"half")
    assert f"{LEFTOVER}: left by a dead writer" in ckpt("ls", mixed).stdout
    (mixed / LEFTOVER).unlink()
    with owner_of(mixed, "own") as other:
        pid = other.pid
        (mixed / LEFTOVER).write_bytes(b"half")
        text = ckpt("ls", mixed).stdout
        assert f"in use by process {pid} on " in text
        assert "which has ended" not in text
        assert f"{LEFTOVER}: under way" in text
        owner = content(mixed)["owner"]
        assert (owner["pid"], owner["ended"]) == (pid, False)
    text = ckpt("ls", mixed).stdout
    assert "in use" not in text
    assert "left by a dead writer" in text


def test_ls_names_a_writer_that_has_survived_its_trainer(mixed: Path) -> None:
    with owner_of(mixed, "own", "own_as_writer") as other:
        assert f"in use by the writer of process {other.pid} on" in ckpt("ls", mixed).stdout


def test_ls_of_an_empty_folder(tmp_path: Path) -> None:
    assert ckpt("ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"


def test_names_are_not_markup(tmp_path: Path) -> None:
    save_file(tmp_path / "[red]x[bold].ckpt")
    assert "[red]x[bold].ckpt" in ckpt("ls", tmp_path).stdout


@pytest.mark.parametrize("command", [("ls",), ("prune", "--keep", "1", "--yes")], ids=str)
def test_what_is_no_folder_of_checkpoints(mixed: Path, command: tuple[str, ...]) -> None:
    def said(path: str | Path) -> str:
        return refusal("ckpt", *command, path)

    assert said(mixed / "no") == (
        f"There is no folder {mixed}/no; give the one that checkpoints are saved to (dirpath)"
    )
    assert said(mixed / "a.ckpt") == f"{mixed}/a.ckpt is a file, not a folder of checkpoints"
    assert "b.ckpt is one checkpoint, not a folder" in said(mixed / "b.ckpt")
    assert "nosuchstore" in said("nosuchstore://bucket/x")


def test_verify_says_ok_line_by_line(mixed: Path) -> None:
    (mixed / "cut.ckpt").unlink()
    text = printed("ckpt", "verify", mixed)
    found = [line.split() for line in text.splitlines()]
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


def test_verify_of_shards_without_their_manifest(tmp_path: Path) -> None:
    save_sharded(tmp_path / "x")
    (tmp_path / "x" / "manifest.json").unlink()
    result = ckpt("verify", tmp_path / "x")
    assert result.exit_code == 1
    assert "has no manifest.json" in result.stdout


def test_verify_refuses_what_is_not_there(mixed: Path, tmp_path: Path) -> None:
    said = refusal("ckpt", "verify", mixed / "a.ckpt", mixed / "no.ckpt")
    assert said == (
        f"There is no checkpoint or folder at {mixed}/no.ckpt; lightning-dist ckpt ls DIR lists "
        "the checkpoints of a folder"
    )
    (tmp_path / "empty").mkdir()
    assert refusal("ckpt", "verify", tmp_path / "empty").startswith("There are no checkpoints in ")


def test_consolidate_makes_a_file_for_torch(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.int8), "step": 7}
    save_sharded(tmp_path / "s.ckpt", ranks=3, records=records_of(state))
    target = tmp_path / "full.pt"
    text = printed("ckpt", "consolidate", tmp_path / "s.ckpt", target)
    assert f"torch.load({str(target)!r}, map_location='cpu')" in text
    assert text.startswith(f"{target}: {target.stat().st_size / 1000:.1f} kB\n")
    loaded = torch.load(target, map_location="cpu")
    assert loaded.keys() == state.keys()
    assert loaded["w"].equal(state["w"])
    assert loaded["b"].equal(state["b"])
    assert ckpt("verify", target).exit_code == 0


def test_consolidate_refuses(mixed: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pt"

    def said(source: Path, target: Path = target, code: int = 2) -> str:
        return refusal("ckpt", "consolidate", source, target, code=code)

    assert said(mixed / "no") == (
        f"There is no checkpoint at {mixed}/no; lightning-dist ckpt ls DIR lists those of a folder"
    )
    assert "Only a folder of shards" in said(mixed / "a.ckpt")
    assert "Only a folder of shards" in said(mixed / "c")
    assert said(mixed / "b.ckpt", tmp_path / "x" / "y.pt") == (
        f"There is no folder {tmp_path}/x; create it first"
    )
    assert not target.exists()
    target.write_bytes(b"precious")
    assert "exists; remove it first" in said(mixed / "b.ckpt")
    assert target.read_bytes() == b"precious"
    target.unlink()
    damage(next((mixed / "b.ckpt").glob("shard-*")))
    assert "has changed since it was written" in said(mixed / "b.ckpt", code=1)
    assert not target.exists()


def test_every_command_on_an_object_store(memory: str) -> None:
    records = records_of({"w": torch.arange(10)})
    for step in (1, 2):
        save_file(f"{memory}/{step}.ckpt", step=step)
    save_sharded(f"{memory}/3.ckpt", step=3, records=records)
    assert [(n, f["kind"]) for n, f in listed(memory).items()] == [
        ("3.ckpt", "sharded"), ("2.ckpt", "single"), ("1.ckpt", "single")
    ]  # fmt: skip
    assert ckpt("verify", memory).exit_code == 0
    result = ckpt("prune", memory, "--keep", "2", stdin="y\n")
    assert "no locks here" in result.stdout
    assert set(listed(memory)) == {"2.ckpt", "3.ckpt"}
    result = ckpt("consolidate", f"{memory}/3.ckpt", f"{memory}/full.pt")
    assert result.exit_code == 0
    assert "fsspec.open(" in result.stdout
    with fsspec.open(f"{memory}/full.pt") as file:
        assert torch.load(file)["w"].equal(torch.arange(10))


@pytest.mark.parametrize("root", ["memory://", "memory:///"])
def test_the_root_of_a_store(root: str) -> None:
    path = save_file(f"memory://{os.urandom(4).hex()}.ckpt")
    assert listed(root)[path.removeprefix("memory://")]["problem"] is None
    fsspec.filesystem("memory").rm(path)


def test_on_an_object_store_what_may_be_under_way_stays(memory: str) -> None:
    save_file(f"{memory}/1.ckpt", step=1)
    save_file(f"{memory}/2.ckpt", step=2)
    save_sharded(f"{memory}/3.ckpt", step=3)
    fsspec.filesystem("memory").rm_file(f"{memory}/3.ckpt/manifest.json")
    assert ckpt("prune", memory, "--keep", "1", "--yes").exit_code == 0
    assert set(listed(memory)) == {"2.ckpt", "3.ckpt"}
    assert ckpt("verify", memory).exit_code == 1
