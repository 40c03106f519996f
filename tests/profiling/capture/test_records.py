"""Records of ranks as files, and those of other folders."""

import gc
import json
import random
import re
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist
from planted import Planted, records_of, write
from worlds import Rank, run_threads

from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture import files
from lightning_dist.profiling.capture.events import (
    SCHEMA,
    BurstRecord,
    EndRecord,
    ErrorRecord,
    LinkRecord,
    Record,
    from_line,
    to_line,
)
from lightning_dist.profiling.capture.files import gather_records, ranks_apart
from lightning_dist.profiling.run import read_run


@pytest.mark.parametrize(
    "record",
    [
        *records_of(Planted(steps=1, shift={1: 3}).run().ranks[1]),
        ErrorRecord(step=3, bucket=1, relative_l2=0.01, cosine=0.99),
        LinkRecord("inter", sent=1 << 20, seconds=0.01, peer=1),
        BurstRecord("inter", "all_gather", sent=4096, count=16, seconds=0.01, cpu=0.005),
        EndRecord("SIGTERM"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_line_is_the_record(record: Record) -> None:
    line = to_line(record)
    assert b"\n" not in line
    again = from_line(line)
    assert to_line(again) == line
    assert type(again) is type(record)


def test_a_folder_is_the_run(tmp_path: Path) -> None:
    planted = Planted(shift={1: 3}).run()
    write(tmp_path, planted.ranks.values())
    run = read_run(tmp_path)
    assert run.notes == []
    assert run.common_steps == list(range(6))
    assert run.world_size == 2
    assert run.ranks[1].steps == planted.ranks[1].steps
    assert run.ranks[1].end == EndRecord("finished")


@pytest.mark.parametrize("is_on", [True, False])
def test_reading_leaves_the_collector_as_it_was(tmp_path: Path, is_on: bool) -> None:
    write(tmp_path, Planted(steps=400).run().ranks.values())
    before, searches = gc.isenabled(), []

    def on_search(phase: str, info: dict[str, int]) -> None:
        searches.append(phase)

    gc.callbacks.append(on_search)
    try:
        gc.enable() if is_on else gc.disable()
        read_run(tmp_path)
        assert gc.isenabled() == is_on
    finally:
        gc.callbacks.remove(on_search)
        gc.enable() if before else gc.disable()
    assert len(searches) < 10  # one can come right before, and one right after


def test_what_a_later_version_adds_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, Planted(world_size=1, steps=2).run().ranks.values())
    path = tmp_path / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["more"] = 1
        line.get("spans", [[]])[0].append("more")
    lines.insert(1, {"kind": "weather", "sunny": True})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = read_run(tmp_path)
    assert run.notes == []
    assert run.ranks[0].steps == Planted(world_size=1, steps=2).run().ranks[0].steps


def test_what_an_older_version_left_out_has_its_default() -> None:
    line = '{"kind":"step","step":4,"begin":5,"duration":6,"spans":[["encode",0,1,2]]}'
    record = from_line(line)
    assert record.spans[0].op == ""
    assert record.buckets == ()
    assert record.overhead == 0


def test_lines_that_a_crash_cut_short_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, Planted().run().ranks.values())
    path = tmp_path / "rank1.jsonl"
    whole = path.read_bytes()
    steps_end = whole.index(b'{"kind":"end"')
    path.write_bytes(whole[: steps_end - 40])
    run = read_run(tmp_path)
    assert run.common_steps == list(range(5))
    assert run.notes == [
        "rank1.jsonl: 1 line truncated or invalid, first line 9",
        "rank 1 is missing from step 5 on",
    ]
    assert run.ranks[1].end is None


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"{",
            b"[1]",
            b"7",
            b'{"a":1}',
            b"\xff\xfe",
            b'{"kind":"step"}',
            b'{"kind":"end","reason":',
        ),
        *(b'{"kind":[]}', b'{"kind":{}}', b'{"kind":null}', b"[" * 100_000, b'{"a":' * 100_000),
        b'{"kind":"end","reason":7}',
        b'{"kind":"link","group":"flat","sent":1,"seconds":1,"peer":"b"}',
        b'{"kind":"error","step":1,"bucket":0,"relative_l2":0.1,"cosine":"a"}',
        b'{"kind":"step","step":4,"begin":5,"duration":6,"detailed":"no"}',
        b'{"kind":"step","step":4,"begin":5,"duration":6,"spans":null}',
        b'{"kind":"step","step":9,"begin":5,"duration":%d}' % 10**30,
        *(
            b'{"kind":"step","step":9,"begin":5,"duration":6,"spans":[%s]}' % row
            for row in (b"{}", b"[1]", b'"text"', b"7", b"null", b'["encode",0,1,"a"]')
        ),
    ],
    ids=lambda line: line[:60].decode(errors="replace"),
)
def test_foreign_lines_are_left_out(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, Planted().run().ranks.values())
    with (tmp_path / "rank0.jsonl").open("ab") as file:
        file.write(line + b"\n")
    run = read_run(tmp_path)
    assert run.common_steps == list(range(6))
    assert run.notes == ["rank0.jsonl: 1 line truncated or invalid, first line 9"]


@pytest.mark.parametrize(
    "change",
    [
        {"groups": None},
        {"groups": [0, 1]},
        {"groups": {"flat": 2}},
        {"groups": {"flat": [[0], 1]}},
        {"node": ["a"]},
        {"codec": None},
        {"versions": 2},
        {"schema": "1"},
    ],
    ids=str,
)
def test_a_first_line_that_is_damaged_names_the_file(
    tmp_path: Path, change: dict[str, object]
) -> None:
    ranks = Planted().run().ranks
    write(tmp_path, ranks.values())
    path = tmp_path / "rank1.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), **change}) + "\n" + "".join(rest))
    run = read_run(tmp_path)
    assert list(run.ranks) == [0]
    assert run.notes[:2] == [
        "rank1.jsonl: 1 line truncated or invalid, first line 1",
        "rank1.jsonl does not name its rank",
    ]
    assert summarize(run).steps == 4


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    ranks = Planted(world_size=3).run().ranks
    write(tmp_path, [ranks[0], ranks[2]])
    run = read_run(tmp_path)
    assert list(run.ranks) == [0, 2]
    assert run.notes == ["nothing of rank 1"]
    assert run.world_size == 3


def test_a_rank_of_another_run_is_left_out(tmp_path: Path) -> None:
    """Copied together by hand: it would be said to wait for the other."""
    here, there = Planted(codec="int8").run().ranks, Planted(codec="ddp", steps=9).run().ranks
    write(tmp_path, [here[0], there[1]])
    run = read_run(tmp_path)
    assert list(run.ranks) == [0]
    assert run.notes == [
        "rank1.jsonl is of another run, with ddp and 2 ranks instead of int8 and 2; left out",
        "nothing of rank 1",
    ]


def test_a_rank_without_a_step(tmp_path: Path) -> None:
    write(tmp_path, Planted(steps=0).run().ranks.values())
    run = read_run(tmp_path)
    assert run.common_steps == []
    assert run.notes == ["rank 0 has recorded no step", "rank 1 has recorded no step"]


@pytest.mark.parametrize("other", [SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_refused(tmp_path: Path, other: int) -> None:
    about = Planted(steps=0).run().ranks[0].metadata
    line = to_line(about).decode().replace(f'"schema":{SCHEMA}', f'"schema":{other}')
    (tmp_path / "rank0.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=f"schema {other} where this one reads {SCHEMA}"):
        read_run(tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: None])
def test_what_is_no_folder_of_a_run(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x")
    with pytest.raises(ValueError, match=r"CommProfiler|no rank"):
        read_run(tmp_path / "x")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, Planted().run().ranks.values())
    (tmp_path / "rank1.jsonl").unlink()
    (tmp_path / "rank1.jsonl").mkdir()
    assert read_run(tmp_path).notes[0] == "rank1.jsonl cannot be read: Is a directory"


def test_spans_stay_in_the_file_until_their_step_is_asked_for(tmp_path: Path) -> None:
    planted = Planted(steps=300, buckets=16).run()
    write(tmp_path, planted.ranks.values())
    read_run(tmp_path)  # what reading itself keeps
    tracemalloc.start()
    run = read_run(tmp_path)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 600 * 400  # bytes of a step; as objects its spans take some thousands
    head = run.ranks[1].head(7)
    assert (head.duration, head.spans) == (planted.ranks[1].steps[7].duration, ())
    assert run.ranks[1].steps[7] == planted.ranks[1].steps[7]
    assert asdict(summarize(run)) == asdict(summarize(planted))


def test_a_file_that_changes_while_it_is_looked_at(tmp_path: Path) -> None:
    write(tmp_path, Planted().run().ranks.values())
    run = read_run(tmp_path)
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b"\n" * 8 + path.read_bytes())
    with pytest.raises(ValueError, match=r"line|rank0.jsonl"):
        run.ranks[0].steps[3]
    path.unlink()
    with pytest.raises(OSError, match=r"rank0.jsonl"):
        run.ranks[0].steps[3]


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
    (tmp_path / "file").touch()
    unwritable = tmp_path / "file" / "folder"
    assert run_threads(lambda r: ranks_apart(unwritable, r.group("p")), 2) == [[1], [1]]


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
    send, receive = files._send, files._receive

    def receive_of_some(rank: int, group: dist.ProcessGroup) -> bytes:
        if rank == 1:
            raise RuntimeError("[/gloo/pair.cc:1] Connection closed by peer. More words")
        return receive(rank, group)

    def send_of_some(data: bytes, group: dist.ProcessGroup) -> None:
        if group.rank() != 1:
            send(data, group)

    monkeypatch.setattr(files, "_receive", receive_of_some)
    monkeypatch.setattr(files, "_send", send_of_some)
    (problem,), *others = gathered(folders)
    assert re.fullmatch(r"records of rank 1 are incomplete: Connection closed by peer", problem)
    assert others == [[], []]
    assert (folders[0] / "rank2.jsonl").read_bytes() == content(2, 4)
    assert not (folders[0] / "rank1.jsonl").exists()
