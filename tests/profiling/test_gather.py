"""Records of ranks with other folders reach rank 0's: over real groups, into real files."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from worlds import Rank, run_threads

from lightning_dist.profiling.capture import files
from lightning_dist.profiling.capture.files import gather_records, ranks_apart


def content(rank: int, lines: int) -> bytes:
    noise = random.Random(rank)
    return b"".join(b"%d %d\n" % (rank, noise.getrandbits(99)) for _ in range(lines))


def gathered(folders: Sequence[Path]) -> list[list[str]]:
    """Problems of every rank, whose file is in one of ``folders``."""

    def one(rank: Rank) -> list[str]:
        group, folder = rank.group("profile"), folders[rank.rank]
        path = folder / f"rank{rank.rank}.jsonl"
        return gather_records(path, ranks=ranks_apart(folder, group), group=group)

    return run_threads(one, len(folders))


def test_who_shares_the_folder_of_rank_0(tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "a").mkdir()
    link.symlink_to(tmp_path / "a")
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "a", link]
    assert run_threads(lambda r: ranks_apart(folders[r.rank], r.group("p")), 4) == [[1]] * 4
    assert not list((tmp_path / "a").iterdir())
    assert run_threads(lambda r: ranks_apart(tmp_path, r.group("p")), 1) == [[]]


def test_nobody_shares_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    assert run_threads(lambda r: ranks_apart(folder, r.group("p")), 2) == [[1], [1]]


@pytest.mark.parametrize("chunk", [100, 2**23])
def test_files_of_others_are_in_the_folder_of_rank_0(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty, short and long ones, in any number of chunks; one rank shares the folder."""
    monkeypatch.setattr(files, "_CHUNK", chunk)
    folders = [tmp_path / name for name in "aabcd"]
    contents = [content(rank, lines) for rank, lines in enumerate((3, 5, 0, 1, 200))]
    for rank, (folder, each) in enumerate(zip(folders, contents, strict=True)):
        folder.mkdir(exist_ok=True)
        (folder / f"rank{rank}.jsonl").write_bytes(each)
    before = threading.active_count()
    assert gathered(folders) == [[]] * 5
    assert threading.active_count() == before
    found = [tmp_path / "a" / f"rank{rank}.jsonl" for rank in range(5)]
    assert [path.read_bytes() if path.exists() else b"" for path in found] == contents


def test_files_that_cannot_be_read_or_written_cost_no_others(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for rank in (1, 3):
        folders[rank].mkdir()
        (folders[rank] / f"rank{rank}.jsonl").write_bytes(content(rank, 4))
    (folders[0] / "rank1.jsonl").mkdir(parents=True)
    assert gathered(folders) == [
        ["records of rank 1 were not written: Is a directory"],
        [],
        [f"{folders[2] / 'rank2.jsonl'} cannot be read: No such file or directory"],
        [],
    ]
    assert (folders[0] / "rank3.jsonl").read_bytes() == content(3, 4)


def test_a_rank_that_is_gone_costs_its_own_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "abc"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / f"rank{rank}.jsonl").write_bytes(content(rank, 4))
    receive = files._receive

    def receive_of_some(rank: int, group: dist.ProcessGroup) -> bytes:
        if rank != 1:
            return receive(rank, group)
        group.recv([files.torch.zeros(1, dtype=files.torch.int64)], rank, 0).wait()
        raise RuntimeError("[/gloo/pair.cc:1] Connection closed by peer. More words")

    monkeypatch.setattr(files, "_receive", receive_of_some)
    monkeypatch.setattr(files, "_send", _send_once_of_rank_1(files._send))
    (problem,), *others = gathered(folders)
    assert re.fullmatch(r"records of rank 1 are incomplete: Connection closed by peer", problem)
    assert others == [[], []]
    assert (folders[0] / "rank2.jsonl").read_bytes() == content(2, 4)
    assert not (folders[0] / "rank1.jsonl").exists()


def _send_once_of_rank_1(send: object) -> object:
    """Rank 1 gets no further than the length of its first chunk."""

    def sends(data: bytes, group: dist.ProcessGroup) -> None:
        if group.rank() != 1:
            send(data, group)
        elif data:
            group.send([files.torch.tensor([len(data)])], 0, 0).wait()

    return sends
