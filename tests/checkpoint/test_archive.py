"""The archive is the zip that zipfile and torch.load read, byte for byte, of any size."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snapshots import assert_equal, small_state, trained, write_file
from torch import nn

from lightning_dist.checkpoint.disk.archive import (
    ROOT,
    Archive,
    Record,
    archive_nbytes,
    combine,
    combined,
    crc32,
)
from lightning_dist.checkpoint.snapshot.pickling import pickled

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
    if "mmap" not in arguments:
        with path.open("rb") as file:
            assert_equal(torch.load(file, **arguments), state)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@dataclass
class Config:
    """An object that torch knows nothing of."""

    name: str
    weight: torch.Tensor


def tied() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model.state_dict()


def views() -> Any:
    base = torch.arange(24.0)
    return {"base": base, "part": base[3:9], "matrix": base.view(4, 6).T, "step": base[::2]}


def optimizer(kind: type[torch.optim.Optimizer], **arguments: Any) -> Callable[[], Any]:
    def state() -> Any:
        model, made = trained(kind, **arguments)
        return {"model": model.state_dict(), "optimizer": made.state_dict()}

    return state


STATES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no tensors": lambda: {"a": [1, 2.5, "x", None, (1, 2)], "b": {3: {4: b"5"}}},
    "tied": tied,
    "views": views,
    "module": lambda: trained()[0],
    "parameter": lambda: nn.Parameter(torch.ones(3), requires_grad=False),
    "adamw": optimizer(torch.optim.AdamW),
    "amsgrad": optimizer(torch.optim.AdamW, amsgrad=True),
    "sgd": optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "empty": lambda: [torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.int64)],
    "scalar": lambda: torch.tensor(3.5),
    "ordered": lambda: OrderedDict(z=torch.ones(2), a=OrderedDict(b=torch.zeros(1))),
    "same twice": lambda: [torch.ones(3)] * 2,
    "object": lambda: Config("x", torch.ones(2)),
    "typed storage": lambda: {"s": torch.arange(3.0).storage(), "t": torch.ones(2)},
    "untyped storage": lambda: torch.arange(3.0).untyped_storage(),
    "tensor and its storage": lambda: (lambda t: [t, t.storage()])(torch.arange(4.0)),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "random state": lambda: {"torch": torch.get_rng_state(), "size": torch.Size([2, 3])},
    "meta": lambda: torch.empty(3, device="meta"),
    "dtypes": lambda: {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES},
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", STATES)
def test_the_pickle_is_torchs(name: str) -> None:
    state = STATES[name]()
    file = io.BytesIO()
    torch.save(state, file)
    found = pickled(state)
    with zipfile.ZipFile(file) as archive:
        root = archive.namelist()[0].split("/")[0]
        assert found.data == archive.read(f"{root}/data.pkl")
        stored = [n for n in archive.namelist() if n.startswith(f"{root}/data/")]
        assert len(stored) == len(found.storages)
        for key, storage in enumerate(found.storages):
            assert bytes(storage.tolist()) == archive.read(f"{root}/data/{key}")


def test_memory_seen_as_two_dtypes_is_refused() -> None:
    """As by ``torch.save``, which would give it back as one of them."""
    tensor = torch.ones(4)
    state = [tensor, tensor.view(torch.int32)]
    with pytest.raises(RuntimeError, match="different types"):
        torch.save(state, io.BytesIO())
    with pytest.raises(ValueError, match="clone one of them in on_save_checkpoint"):
        pickled(state)


def test_what_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(AttributeError, match="local object"):
        pickled({"f": lambda: None})


@given(st.lists(st.binary(max_size=300)))
def test_many_parts(parts: list[bytes]) -> None:
    whole = zlib.crc32(b"".join(parts))
    assert combined((zlib.crc32(part), len(part)) for part in parts) == whole
    assert crc32(parts) == whole
    assert crc32(map(memoryview, parts)) == whole


@given(st.binary(max_size=40), st.integers(0, 1 << 22))
def test_long_second_parts(first: bytes, nbytes: int) -> None:
    zeros = zlib.crc32(bytes(nbytes))
    assert combine(zlib.crc32(first), zeros, nbytes) == zlib.crc32(bytes(nbytes), zlib.crc32(first))


def test_parts_beyond_four_gib() -> None:
    """Five times a GiB of zeros, from the checksum of one."""
    gib = combined([(zlib.crc32(bytes(1 << 20)), 1 << 20)] * 1024)
    whole = combined([(gib, 1 << 30)] * 5)
    assert combine(0, whole, 5 << 30) == whole
    halves = combine(combined([(gib, 1 << 30)] * 2), combined([(gib, 1 << 30)] * 3), 3 << 30)
    assert halves == whole


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
