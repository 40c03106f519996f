"""``lightning-dist ckpt prune``, whatever a folder holds."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from calls import LEFTOVER, ckpt, listed, names, printed, refusal, steps
from cli_saves import damage, save_file, save_sharded
from folder_owners import owner
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.disk.storage import storage_of


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
