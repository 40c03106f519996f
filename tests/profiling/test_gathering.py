"""Lines of ranks with other folders reach rank 0's: over real groups, into real files."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run
from worlds import Rank, run_threads

from lightning_dist.profiling.capture import gathering
from lightning_dist.profiling.capture.gathering import Gatherer, is_shared
from lightning_dist.profiling.capture.messenger import Messenger

SCRIPT = Path(__file__).with_name("gather_lines.py")
LIMIT = 20.0


def lines_of(rank: int, count: int, *, width: int = 10) -> list[bytes]:
    return [f"{rank} {number:0{width}}\n".encode() for number in range(count)]


def gathered(
    folders: Sequence[Path],
    work: Callable[[int, Gatherer], None],
    *,
    limit: int = 2**20,
    relay_above: int = 64,
    machines: Sequence[str] = "abcdefgh",
) -> list[Sequence[str]]:
    """What gatherers say in the end whose ranks have these folders."""

    def one(rank: Rank) -> Sequence[str]:
        group, folder = rank.group("profile"), folders[rank.rank]
        gatherer = Gatherer(
            folder,
            group=group,
            is_shared=is_shared(folder, group),
            limit=limit,
            relay_above=relay_above,
            machine=machines[rank.rank],
        )
        work(rank.rank, gatherer)
        return gatherer.close(LIMIT)

    return run_threads(one, len(folders))


def own_folders(tmp_path: Path, size: int) -> list[Path]:
    return [tmp_path / str(rank) for rank in range(size)]


def content(folder: Path, rank: int) -> list[bytes]:
    path = folder / f"rank{rank}.jsonl"
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def test_who_shares_the_folder_of_rank_0(tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "a").mkdir()
    link.symlink_to(tmp_path / "a")
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "a", link]
    found = run_threads(lambda r: is_shared(folders[r.rank], r.group("p")), 4)
    assert found == [True, False, True, True]
    assert not list((tmp_path / "a").iterdir())


def test_nobody_shares_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    assert run_threads(lambda r: is_shared(folder, r.group("p")), 2) == [True, False]


def test_a_rank_alone_has_nobody_to_ask(tmp_path: Path) -> None:
    assert is_shared(tmp_path / "not there", None)
    gatherer = Gatherer(tmp_path, group=None, is_shared=True)
    gatherer.collect(b"line\n")
    assert not gatherer.is_needed
    assert gatherer.close(0) == ()


@pytest.mark.parametrize("relay_above", [64, 3])
def test_lines_of_others_are_in_the_folder_of_rank_0(tmp_path: Path, relay_above: int) -> None:
    folders = [tmp_path / name for name in "aabbc"]
    everything = [lines_of(rank, 40) for rank in range(5)]

    def work(rank: int, gatherer: Gatherer) -> None:
        assert gatherer.is_needed
        for start in range(0, 40, 10):
            gatherer.collect(b"".join(everything[rank][start : start + 10]))

    found = gathered(folders, work, relay_above=relay_above, machines="aabbc")
    assert found == [()] * 5
    assert [content(tmp_path / "a", rank) for rank in range(5)] == [[], [], *everything[2:]]
    assert not (tmp_path / "b").exists()


def test_nobody_has_a_thread_where_all_share_the_folder(tmp_path: Path) -> None:
    before = threading.active_count()

    def work(rank: int, gatherer: Gatherer) -> None:
        assert not gatherer.is_needed
        gatherer.collect(b"line\n")

    assert gathered([tmp_path] * 3, work) == [()] * 3
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


@settings(max_examples=8)
@given(
    calls=st.lists(st.lists(st.integers(0, 60), max_size=4), min_size=3, max_size=3),
    limit=st.integers(1, 200),
    relay_above=st.sampled_from([1, 64]),
)
def test_any_lines_in_any_calls_arrive_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[list[int]],
    limit: int,
    relay_above: int,
) -> None:
    """Also where ranks have called differently often: an error has ended the training of some."""
    folders = own_folders(tmp_path_factory.mktemp("folders"), 4)

    def work(rank: int, gatherer: Gatherer) -> None:
        for count in calls[rank - 1] if rank else range(2):
            gatherer.collect(b"".join(lines_of(rank, count)))

    found = gathered(folders, work, limit=limit, relay_above=relay_above, machines="abbb")
    assert found == [()] * 4
    for rank, counts in enumerate(calls, start=1):
        expected = [line for count in counts for line in lines_of(rank, count)]
        assert content(folders[0], rank) == expected


def test_much_takes_several_calls_and_is_cut_between_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = own_folders(tmp_path, 2)
    everything, more = lines_of(1, 1000, width=100), [b"x" * 3000 + b"\n"]
    monkeypatch.setattr(gathering, "_BACKLOG", sum(map(len, everything)))  # `more` fits in later
    path, has_arrived, first = folders[0] / "rank1.jsonl", threading.Event(), list[bytes]()

    def work(rank: int, gatherer: Gatherer) -> None:
        if rank == 1:
            gatherer.collect(b"".join(everything))
            assert has_arrived.wait(LIMIT)
            gatherer.collect(b"".join(more))
            return
        os.mkfifo(path)
        gatherer.collect(b"")
        first.append(path.read_bytes())  # to the end of what is written at once
        path.unlink()
        has_arrived.set()

    assert gathered(folders, work, limit=5000) == [()] * 2
    count = 5000 // len(everything[0])
    assert first == [b"".join(everything[:count])]
    assert content(folders[0], 1) == [*everything[count:], *more]


def test_only_a_rank_whose_lines_travel_reads_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "aab"]
    files = [folder / f"rank{rank}.jsonl" for rank, folder in enumerate(folders)]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"line\n")
    opened: list[Path] = []
    open_path = Path.open

    def record(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path)
        return open_path(path, *args, **kwargs)

    def work(rank: int, gatherer: Gatherer) -> None:
        assert gatherer.sends == (rank == 2)
        Messenger(gatherer, files[rank]).send()

    monkeypatch.setattr(Path, "open", record)
    assert gathered(folders, work) == [()] * 3
    assert set(opened) & set(files) == {files[2]}
    assert content(folders[0], 2) == [b"line\n"]


def test_megabytes_arrive(tmp_path: Path) -> None:
    folders = own_folders(tmp_path, 2)
    noise = random.Random(7).randbytes(3 * 2**20).hex()
    everything = b"".join(f"{noise[i : i + 100]}\n".encode() for i in range(0, len(noise), 100))

    def work(rank: int, gatherer: Gatherer) -> None:
        gatherer.collect(everything if rank else b"")

    assert gathered(folders, work, limit=4 * 2**20) == [()] * 2
    assert b"".join(content(folders[0], 1)) == everything


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_BACKLOG", 2**20)
    folders, given_all = own_folders(tmp_path, 2), threading.Event()

    def work(rank: int, gatherer: Gatherer) -> None:
        if rank == 0:
            assert given_all.wait(LIMIT)
            return
        for letter in (b"a", b"b", b"c"):
            gatherer.collect(letter * (600_000 if letter != b"c" else 1000) + b"\n")
        given_all.set()
        gatherer.collect(b"d\n")

    zero, one = gathered(folders, work, limit=100_000)
    assert zero == ()
    assert one == ("from some step on no lines were sent: 1 MiB were waiting already",)
    assert [line[:1] for line in content(folders[0], 1)] == [b"a"]  # and no gap before others


def test_close_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    folders, gave_up = own_folders(tmp_path, 2), threading.Event()

    def work(rank: int, gatherer: Gatherer) -> None:
        gatherer.collect(b"line\n")
        if rank == 1:
            assert gave_up.wait(LIMIT)
        else:
            assert gatherer.close(0.05) == ("not all lines have travelled within 0.05 s",)
            gave_up.set()

    assert gathered(folders, work)[1] == ()
    for thread in threading.enumerate():  # that of rank 0 ends as soon as rank 1 has closed
        if thread.name == "lightning_dist profile":
            thread.join(LIMIT)
    assert content(folders[0], 1) == [b"line\n"]


def test_a_disk_that_refuses_lines_holds_nobody_up(tmp_path: Path) -> None:
    folders = own_folders(tmp_path, 3)
    (folders[0] / "rank1.jsonl").mkdir(parents=True)

    def work(rank: int, gatherer: Gatherer) -> None:
        for _ in range(3):
            gatherer.collect(b"line\n")

    zero, *rest = gathered(folders, work)
    assert zero == ("lines of rank 1 are not written: Is a directory",)
    assert rest == [(), ()]
    assert content(folders[0], 2) == [b"line\n"] * 3


def test_a_limit_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit must be at least 1 byte, got 0"):
        Gatherer(tmp_path, group=None, is_shared=True, limit=0)


def test_a_rank_that_dies_costs_its_own_lines(tmp_path: Path) -> None:
    finished = run([sys.executable, SCRIPT, tmp_path], limit=60)
    said = [json.loads(line) for line in finished.output.splitlines() if line[:7] == '{"rank"']
    problems = {each["rank"]: each["problems"] for each in said}
    assert problems.keys() == {0, 1, 3}, finished.output
    (problem,) = problems[0]
    # the connection is reset or at its end; the text is that of gloo
    assert re.fullmatch(r"nothing more comes from rank 2: [A-Z][^\n]{10,100}", problem)
    assert problems[1] == problems[3] == []
    for rank, expected in {1: range(6), 3: range(6)}.items():
        assert content(tmp_path / "0", rank) == [
            f"step {step} of rank {rank}\n".encode() for step in expected
        ]
    before = content(tmp_path / "0", 2)
    assert before == [f"step {step} of rank 2\n".encode() for step in range(len(before))]
