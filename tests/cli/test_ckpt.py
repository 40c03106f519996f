"""``lightning-dist ckpt ls``, ``verify``, ``consolidate``, ``prune``, whatever a folder holds."""

import errno
import fcntl
import json
import os
import shutil
import time
import zipfile
from pathlib import Path

import fsspec
import pytest
import torch
from calls import LEFTOVER, ckpt, content, listed, names, printed, refusal, steps
from cli_saves import RECORDS, damage, records_of, save_file, save_sharded
from folder_owners import owner
from folder_owners import owner as owner_of
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.disk.storage import storage_of


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
    assert said(mixed).startswith(f"{mixed} is a folder of checkpoints; give one of them: {mixed}/")
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


def left_of(folder: Path, keep: int = 1) -> set[str]:
    """What is there when it has been pruned."""
    printed("ckpt", "prune", folder, "--keep", str(keep), "--yes")
    return names(folder)


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    steps(tmp_path, 3, 1, 2, 4)
    text = printed("ckpt", "prune", tmp_path, "--keep", "2", "--yes")
    assert names(tmp_path) == {"3.ckpt", "4.ckpt"}
    lines = [line.split()[:2] for line in text.splitlines()]
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
    text = printed("ckpt", "prune", tmp_path, "--keep", "1", "--dry-run")
    assert f"remove  {tmp_path}/1.ckpt" in text
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
    assert "--no-lock" in refusal("ckpt", "prune", tmp_path, "--keep", "1", "--yes")
    result = ckpt("prune", tmp_path, "--keep", "1", "--no-lock", stdin="y\n")
    assert "no locks here" in result.stdout
    assert sorted(os.listdir(tmp_path)) == [LEFTOVER, "2.ckpt"]


def test_damaged_ones_do_not_count_and_stay(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3)
    save_sharded(tmp_path / "4.ckpt", step=4)
    damage(tmp_path / "3.ckpt")
    (tmp_path / "4.ckpt" / "manifest.json").unlink()
    text = printed("ckpt", "prune", tmp_path, "--keep", "1", "--yes")
    assert names(tmp_path) == {"2.ckpt", "3.ckpt", "4.ckpt"}
    assert "has changed since it was written" in text
    assert "has no manifest.json" in text


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
        said = refusal("ckpt", "prune", tmp_path, "--keep", "1", *arguments)
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


STATES = st.lists(
    st.tuples(
        st.sampled_from(["whole", "flipped", "cut", "sharded", "shard flipped", "no manifest"]),
        st.sampled_from(["{}.ckpt", "last-{}.ckpt", "best-{}.ckpt"]),
        st.sampled_from([None, "hard", "symbolic"]),
    ),
    max_size=5,
)


def make(folder: Path, step: int, state: str, name: str, link: str | None) -> None:
    path = folder / name.format(step)
    if state in ("whole", "flipped", "cut"):
        save_file(path, step=step)
        if state == "flipped":
            damage(path)
        elif state == "cut":
            os.truncate(path, path.stat().st_size - 30)
    else:
        save_sharded(path, step=step, ranks=1)
        if state == "shard flipped":
            damage(next(path.glob("shard-*")))
        elif state == "no manifest":
            (path / "manifest.json").unlink()
    if link is not None:
        storage, inside = storage_of(str(folder))
        source, target = f"{inside}/{path.name}", f"{inside}/link-{step}.ckpt"
        storage.link(source, target, symbolic=link == "symbolic")


def whole(folder: Path) -> set[str]:
    if not any(path.name.endswith(".ckpt") for path in folder.iterdir()):
        return set()
    verdicts = json.loads(ckpt("verify", folder, "--json").stdout)["checkpoints"]
    return {each["name"] for each in verdicts if each["problem"] is None}


@given(states=STATES, keep=st.integers(1, 3))
def test_prune_keeps_as_many_whole_ones_as_asked(
    tmp_path_factory: pytest.TempPathFactory,
    states: list[tuple[str, str, str | None]],
    keep: int,
) -> None:
    folder = tmp_path_factory.mktemp("prune")
    for step, (state, name, link) in enumerate(states, 1):
        make(folder, step, state, name, link)
    before, all_names = whole(folder), names(folder)
    steps_of = {name: each["step"] for name, each in listed(folder).items()}
    printed("ckpt", "prune", folder, "--keep", str(keep), "--yes")
    after, left = whole(folder), names(folder)

    assert after == before & left, "nothing that stays is harmed"
    assert {n for n in all_names if n.startswith(("last", "best"))} <= left
    plain = sorted({steps_of[n] for n in before if not n.startswith(("last", "best"))})
    assert set(plain[-keep:]) <= {steps_of[n] for n in after}, "the newest whole ones stay"
    assert bool(after) == bool(before), "never the last whole one"
    if not before:
        assert left == all_names
    shutil.rmtree(folder)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_last_is_linked_to_stays(tmp_path: Path, symbolic: bool, sharded: bool) -> None:
    save = save_sharded if sharded else save_file
    for step in (1, 2, 3, 4):
        save(tmp_path / f"{step}.ckpt", step=step)
    storage, inside = storage_of(str(tmp_path))
    storage.link(f"{inside}/2.ckpt", f"{inside}/last.ckpt", symbolic=symbolic)
    assert left_of(tmp_path) == {"4.ckpt", "2.ckpt", "last.ckpt"}
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
    assert left_of(tmp_path) == {"4.ckpt", "other.ckpt", "teacher.ckpt"}


def test_what_a_link_of_a_user_points_to_stays(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3)
    (tmp_path / "paper.ckpt").symlink_to("1.ckpt")
    assert left_of(tmp_path) == {"3.ckpt", "1.ckpt", "paper.ckpt"}


def test_last_of_a_save_of_its_own_does_not_count(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    save_file(tmp_path / "last.ckpt", step=3)
    assert left_of(tmp_path) == {"last.ckpt", "2.ckpt"}


def test_a_damaged_last_stays_and_so_does_what_it_points_to(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    os.truncate(tmp_path / "2.ckpt", 500)  # not even its headers can be read
    (tmp_path / "last.ckpt").symlink_to("2.ckpt")
    assert left_of(tmp_path) == {"1.ckpt", "2.ckpt", "last.ckpt"}
