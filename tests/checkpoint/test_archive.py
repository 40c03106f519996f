"""The archive is the zip that Python's own zipfile and torch.load read."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snapshots import assert_equal, small_state, write_file

from lightning_dist.checkpoint.disk.archive import ROOT, Archive, Record, archive_nbytes

names = st.text(st.characters(exclude_categories=["C"], exclude_characters="\\"), min_size=1)
records = st.dictionaries(names.filter(lambda n: n.strip("/") == n), st.binary(), max_size=20)


def written(contents: dict[str, bytes]) -> tuple[Archive, bytes]:
    archive, file = Archive(), io.BytesIO()
    for name, content in contents.items():
        file.write(archive.header(name, len(content), zlib.crc32(content)))
        file.write(content)
    file.write(archive.trailer())
    return archive, file.getvalue()


@given(records)
def test_zipfile_reads_the_same_records(contents: dict[str, bytes]) -> None:
    archive, data = written(contents)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
        assert {name: file.read(f"{ROOT}/{name}") for name in contents} == contents
        found = [Record(i.filename, i.file_size, i.CRC, i.header_offset) for i in file.infolist()]
        assert {i.compress_type for i in file.infolist()} <= {zipfile.ZIP_STORED}
    assert found == archive.records


@given(records)
def test_contents_begin_at_multiples_of_64_bytes(contents: dict[str, bytes]) -> None:
    position = 0
    archive = Archive()
    for name, content in contents.items():
        position += len(archive.header(name, len(content), 0))
        assert position % 64 == 0
        position += len(content)
        assert archive.position == position


@given(records)
def test_its_size_is_known_beforehand(contents: dict[str, bytes]) -> None:
    sizes = [(name, len(content)) for name, content in contents.items()]
    assert archive_nbytes(sizes) == len(written(contents)[1])


def test_it_depends_on_nothing_but_the_records() -> None:
    contents = {"data.pkl": b"1", "data/0": b"", "data/1": bytes(200)}
    assert written(contents)[1] == written(contents)[1]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"weights_only": True}, {"weights_only": False}, {"mmap": True}],
    ids=["plain", "weights_only", "everything", "mmap"],
)
def test_torch_loads_it(tmp_path: Path, arguments: dict[str, bool]) -> None:
    path, state = tmp_path / "one.ckpt", small_state()
    write_file(path, state)
    loaded = torch.load(path, **arguments)
    assert_equal(loaded, state)
    assert loaded["weight"].data_ptr() == loaded["tied"].data_ptr()
    assert loaded["weight"].data_ptr() % 64 == 0


def test_torch_loads_it_from_an_open_file(tmp_path: Path) -> None:
    write_file(tmp_path / "one.ckpt", small_state())
    with open(tmp_path / "one.ckpt", "rb") as file:
        assert_equal(torch.load(file), small_state())
