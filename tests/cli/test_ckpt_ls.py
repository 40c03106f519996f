"""``lightning-dist ckpt ls``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from ckpt_calls import LEFTOVER, ckpt, content, listed, refusal, steps
from cli_saves import RECORDS, damage, save_file
from folder_owners import owner as owner_of


def test_ls_shows_every_kind_the_newest_first(mixed: Path) -> None:
    result = ckpt("ls", mixed)
    assert result.exit_code == 0
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


def test_ls_takes_no_lock_and_writes_nothing(mixed: Path) -> None:
    before = sorted(os.listdir(mixed))
    ckpt("ls", mixed)
    assert sorted(os.listdir(mixed)) == before


def test_ls_of_an_empty_folder(tmp_path: Path) -> None:
    assert ckpt("ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"


def test_names_are_not_markup(tmp_path: Path) -> None:
    save_file(tmp_path / "[red]x[bold].ckpt")
    assert "[red]x[bold].ckpt" in ckpt("ls", tmp_path).stdout


@pytest.mark.parametrize("command", [("ls",), ("prune", "--keep", "1", "--yes")], ids=str)
def test_what_is_no_folder_of_checkpoints(mixed: Path, command: tuple[str, ...]) -> None:
    def said(path: str | Path) -> str:
        return refusal(*command, path)

    assert said(mixed / "no") == (
        f"There is no folder {mixed}/no; give the one that checkpoints are saved to (dirpath)"
    )
    assert said(mixed / "a.ckpt") == f"{mixed}/a.ckpt is a file, not a folder of checkpoints"
    assert "b.ckpt is one checkpoint, not a folder" in said(mixed / "b.ckpt")
    assert "nosuchstore" in said("nosuchstore://bucket/x")
