"""Archives past the limits of the first zip format; what is in them is never written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from lightning_dist.checkpoint.disk.archive import Archive

GIB = 1 << 30


def sparse(path: Path, sizes: list[int]) -> Archive:
    """An archive whose records are holes; their checksums are not those of zeros."""
    archive = Archive()
    with open(path, "wb") as file:
        for number, nbytes in enumerate(sizes):
            file.write(archive.header(f"data/{number}", nbytes, number))
            file.seek(nbytes, io.SEEK_CUR)
        file.write(archive.trailer())
    return archive


@pytest.mark.parametrize(
    "sizes",
    [
        [5 * GIB],
        [3 * GIB, 3 * GIB, 100],  # the offset is large, and no record
        [5 * GIB, 6 * GIB, 7],
        [0xFFFFFFFE, 1],
        [0xFFFFFFFF, 1],
        [0x100000000, 1],
    ],
    ids=str,
)
def test_zipfile_finds_records_beyond_4_gib(tmp_path: Path, sizes: list[int]) -> None:
    archive = sparse(tmp_path / "large.ckpt", sizes)
    with zipfile.ZipFile(tmp_path / "large.ckpt") as file:
        found = [(i.file_size, i.compress_size, i.CRC, i.header_offset) for i in file.infolist()]
        for info, record in zip(file.infolist(), archive.records, strict=True):
            with file.open(info) as opened:  # the local header agrees
                assert record.nbytes < 64 << 20 or opened.read(64) == bytes(64)
    assert found == [(r.nbytes, r.nbytes, r.crc32, r.offset) for r in archive.records]


@pytest.mark.parametrize("count", [0xFFFF, 0x10000])
def test_zipfile_counts_more_records_than_fit_in_16_bits(count: int) -> None:
    archive, file = Archive(), io.BytesIO()
    for number in range(count):
        file.write(archive.header(f"data/{number}", 0, 0))
    file.write(archive.trailer())
    assert file.getvalue()[-14:-10] == b"\xff" * 4  # "see the zip64 record", of both counts
    with zipfile.ZipFile(file) as read:
        names = read.namelist()
        assert len(names) == count
        assert names[-1] == f"archive/data/{count - 1}"
        assert read.read(names[-1]) == b""


def test_a_size_of_four_gib_has_both_sizes_in_the_local_header() -> None:
    """APPNOTE 4.5.3: in the local header the zip64 field has both sizes, always."""
    header = Archive().header("data/0", 5 * GIB, 0)
    assert header[18:26] == b"\xff" * 8
    extra = header[30 + len("archive/data/0") :]
    assert extra[:4] == b"\x01\x00\x10\x00"
    assert [int.from_bytes(extra[i : i + 8], "little") for i in (4, 12)] == [5 * GIB] * 2
