"""Several writers, one folder: all of it is there, or every rank knows why not."""

import json
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snapshots import (
    Ranks,
    assert_equal,
    folder_saves,
    origin,
    owned_tensors,
    small_state,
    write_folder,
)  # fmt: skip
from stores import FaultyStorage, broken_disk

from lightning_dist.checkpoint.disk import folder
from lightning_dist.checkpoint.disk import writer as writer_module
from lightning_dist.checkpoint.disk.format import NAME, CorruptCheckpointError, Manifest
from lightning_dist.checkpoint.disk.jobs import Committed, Event, Failed, SaveFolder, write_shard
from lightning_dist.checkpoint.disk.scan import verify
from lightning_dist.checkpoint.disk.storage import storage_of
from lightning_dist.checkpoint.disk.storage.base import Bytes, Sink
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.reading import load

NOTHING = memoryview(b"")
NO_SUCH_FILE = (("a", "/no/such/file"),)


@pytest.fixture(params=["local", "bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/x.ckpt" if request.param == "local" else f"bucket://{uuid.uuid4().hex}/x"


def left(target: str) -> list[str]:
    """Names in the folder of ``target``, and in itself."""
    storage, inside = storage_of(target)
    return [*storage.names(inside.rpartition("/")[0]), *storage.names(inside)]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_commit_one_checkpoint(target: str, ranks: int) -> None:
    events = write_folder(folder_saves(target, small_state(), ranks))
    assert [type(event) for event in events] == [Committed] * ranks
    assert_equal(load(target), small_state())
    described = verify(target)
    assert (described.kind, described.origin) == ("sharded", origin(ranks=ranks))
    assert sum(e.nbytes for e in events if isinstance(e, Committed)) == described.nbytes
    assert not [name for name in left(target) if name.startswith(".")], "a receipt was left"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_does_not_read_back_replaces_nothing(
    target: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(folder_saves(target, small_state(1), ranks), read_back=True)

    def damaging(sink: Sink, *arguments: Any) -> Any:
        return write_shard(_Damaging(sink), *arguments)

    monkeypatch.setattr(folder, "write_shard", damaging)
    new = folder_saves(target, small_state(2), ranks, step=2)
    for event in write_folder(new, read_back=True):
        assert isinstance(event, Failed)
        assert f"shard-00000-of-{ranks:05d}-" in event.reason
        assert "has changed since it was written" in event.reason
    assert_equal(load(target), small_state(1))


class _Damaging:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.close, self.abort = sink.close, sink.abort

    def write(self, data: Bytes) -> None:
        self._sink.write(bytes(byte ^ 1 for byte in data))


def test_a_rank_with_nothing_to_write_has_no_shard(target: str) -> None:
    state = small_state()
    events = write_folder(folder_saves(target, state, 3, owned={}))
    assert [type(event) for event in events] == [Committed] * 3
    assert len([name for name in left(target) if name.endswith(".bin")]) == 1
    assert_equal(load(target), state)


def test_a_rank_may_have_its_own_random_state(target: str) -> None:
    """What is not shared is that of rank 0."""
    saves = []
    for rank in range(2):
        state = small_state()
        state["mask"] += bool(rank)
        saves.append(folder_saves(target, state, 2, owned=owned_tensors(state["weight"]))[rank])
    write_folder(saves)
    assert_equal(load(target), small_state())


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_reason_of_the_rank_that_fails_arrives(tmp_path: Path, bad: int) -> None:
    """Whatever is written to the shard of that rank fails; the folder that was there stays."""
    target = f"{tmp_path}/x.ckpt"
    write_folder(folder_saves(target, small_state(1), 1))
    before = os.listdir(target)

    def before_write(path: str, position: int) -> None:
        if f"shard-{bad:05d}" in path:
            broken_disk(path, position)

    ranks = Ranks(3, find_storage=FaultyStorage(before_write).find)
    events = ranks.write(folder_saves(target, small_state(2), 3, step=2, peer_timeout=20))
    assert [type(event) for event in events] == [Failed] * 3
    reasons = [event.reason for event in events if isinstance(event, Failed)]
    assert reasons[bad].startswith("OSError: [Errno 5] Input/output error")
    other = reasons[0] if bad else reasons[1]
    assert other.startswith(f"rank {bad} could not write: OSError: [Errno 5]")
    assert_equal(load(target), small_state(1))
    bad = -1
    ranks.write(folder_saves(f"{tmp_path}/y.ckpt", small_state(3), 3, step=3))
    assert os.listdir(target) == before, "the checkpoint of before is as it was"
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt", "y.ckpt"], "the next success clears the rest"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_never_comes_fails_the_others(target: str, ranks: int) -> None:
    saves = folder_saves(target, small_state(), ranks, peer_timeout=0.3)
    events = write_folder(saves[:-1])
    assert [type(event) for event in events] == [Failed] * (ranks - 1)
    assert isinstance(events[0], Failed)
    assert events[0].reason == f"waited for rank {ranks - 1}, but no rank wrote anything for 0 s"
    with pytest.raises((FileNotFoundError, CorruptCheckpointError)):
        verify(target)


@pytest.mark.parametrize("dropped", ["", "a tensor has changed"])
def test_a_rank_that_comes_late_learns_of_the_failure_at_once(target: str, dropped: str) -> None:
    """Rank 0 has given up before; nobody waits for the patience of an hour."""
    first, late = folder_saves(target, small_state(), 2, peer_timeout=3600)
    failing = replace(first[0], dropped=dropped, files=() if dropped else NO_SUCH_FILE)
    (event,) = write_folder([(failing, first[1])])
    assert isinstance(event, Failed)
    assert event.dropped == bool(dropped)
    events: list[Event] = []
    Writer(report=events.append).do(*late)
    (event,) = events
    assert isinstance(event, Failed)
    assert event.dropped == bool(dropped)
    assert event.reason.startswith("rank 0: a tensor" if dropped else "rank 0 could not write: ")


def test_a_dropped_part_is_no_fault_of_the_disk(target: str) -> None:
    """The others are told at once, and that the next save will do."""
    saves = folder_saves(target, small_state(), 3, peer_timeout=3600)
    saves[2] = (replace(saves[2][0], ranges=(), dropped="a tensor has changed"), saves[2][1])
    events = write_folder(saves)
    assert [isinstance(event, Failed) and event.dropped for event in events] == [True] * 3
    reasons = [event.reason for event in events if isinstance(event, Failed)]
    assert reasons[2] == "a tensor has changed"
    assert "a tensor has changed" in reasons[0]


def test_orphans_wait_only_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dist.checkpoint.disk.folder._ORPHAN_TIMEOUT", 0.2)
    saves = folder_saves(f"{tmp_path}/x.ckpt", small_state(), 2, peer_timeout=3600)
    (event,) = write_folder(saves[:1], orphaned=lambda: True)
    assert isinstance(event, Failed)
    assert event.reason.startswith("waited for rank 1")


def test_a_rank_without_space_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = folder_saves(f"{tmp_path}/x.ckpt", small_state(), 2, peer_timeout=20)
    needed = writer_module._nbytes
    huge = lambda save: 1 << 60 if save.rank == 1 else needed(save)  # noqa: E731
    monkeypatch.setattr(writer_module, "_nbytes", huge)
    events = write_folder(saves)
    assert isinstance(events[0], Failed)
    assert events[0].reason.startswith("rank 1 could not write: CheckpointError: no space: needs")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_files_of_every_rank_are_in_the_folder(target: str, tmp_path: Path) -> None:
    saves = []
    for rank in range(3):
        source = tmp_path / f"of rank {rank}"
        source.write_bytes(bytes([rank]) * 100)
        files = ((f"random_{rank}.pkl", str(source)),)
        save = SaveFolder(origin(ranks=3), target, (), rank, files=files, peer_timeout=20)
        saves.append((save, NOTHING))
    events = write_folder(saves)
    assert [type(event) for event in events] == [Committed] * 3
    assert verify(target).kind == "folder"
    storage, inside = storage_of(target)
    files = ["manifest.json", *(f"random_{rank}.pkl" for rank in range(3))]
    assert storage.names(inside) == files
    assert storage.read(f"{inside}/random_2.pkl") == b"\2" * 100


def test_the_manifest_says_where_every_record_is(tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    write_folder(folder_saves(target, small_state(), 2))
    manifest = Manifest.from_json((target / NAME).read_text(), path=str(target))
    assert list(manifest.records) == ["data.pkl", "byteorder", "version", "data/0", "data/1"]
    assert [part.file.split("-of-")[0] for part in manifest.records["data/0"]] == [
        "shard-00000", "shard-00001",
    ]  # fmt: skip
    assert set(json.loads((target / NAME).read_text())) == {"body", "crc32"}
