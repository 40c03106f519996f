"""The archive is the zip that zipfile and torch.load read; no change of any byte goes unseen."""

import io
import json
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
from snapshots import (
    assert_equal,
    folder_saves,
    origin,
    small_state,
    trained,
    write_file,
    write_folder,
)
from torch import nn

from lightning_dist.checkpoint.disk import format as manifests
from lightning_dist.checkpoint.disk.format import (
    ROOT,
    Archive,
    CheckpointError,
    CorruptCheckpointError,
    Record,
    archive_nbytes,
    combine,
    combined,
    crc32,
)
from lightning_dist.checkpoint.disk.scan import describe, verify
from lightning_dist.checkpoint.reading import load
from lightning_dist.checkpoint.snapshot.plan import pickled

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


Damage = Callable[[bytes, int], bytes]


def flip(data: bytes, position: int) -> bytes:
    """One bit, another one in every byte."""
    changed = data[position] ^ 1 << (position * 5 + len(data)) % 8
    return data[:position] + bytes([changed]) + data[position + 1 :]


def truncate(data: bytes, position: int) -> bytes:
    return data[:position]


def undetected(checkpoint: Path, file: Path, damage: Damage, start: int = 0) -> list[int]:
    """Positions in ``file`` where damage is not seen."""
    data, missed = file.read_bytes(), []
    for position in range(start, len(data)):
        file.write_bytes(damage(data, position))
        try:
            verify(str(checkpoint))
            missed.append(position)
        except CorruptCheckpointError:
            continue
    file.write_bytes(data)
    verify(str(checkpoint))
    return missed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.ckpt"


@pytest.fixture
def single(path: Path) -> Path:
    """A checkpoint in one file."""
    write_file(path, small_state())
    return path


@pytest.fixture
def sharded(path: Path) -> Path:
    """A checkpoint of two ranks."""
    write_folder(folder_saves(path, small_state(), 2))
    return path


@pytest.mark.parametrize("damage", [flip, truncate])
def test_every_byte_of_a_file_counts(single: Path, damage: Damage) -> None:
    assert undetected(single, single, damage) == []


@pytest.mark.parametrize("damage", [flip, truncate])
def test_every_byte_of_a_folder_counts(sharded: Path, damage: Damage) -> None:
    files = sorted(sharded.iterdir())
    assert len(files) == 3
    for file in files:
        assert undetected(sharded, file, damage) == []


def test_bytes_behind_the_end_count(single: Path) -> None:
    single.write_bytes(single.read_bytes() + b"\0")
    with pytest.raises(CorruptCheckpointError):
        verify(str(single))


def test_every_file_of_a_folder_is_missed(sharded: Path) -> None:
    for file in sorted(sharded.iterdir()):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CorruptCheckpointError, match=file.name):
            load(str(sharded))
        file.write_bytes(content)
    verify(str(sharded))


def test_torch_loads_a_flipped_file_and_load_does_not(single: Path) -> None:
    data = single.read_bytes()
    position = data.index(torch.tensor([11.0, 12.0]).numpy().tobytes())
    single.write_bytes(flip(data, position))
    assert not torch.equal(torch.load(single)["weight"], small_state()["weight"])
    with pytest.raises(CorruptCheckpointError, match="data/0 has changed since it was written"):
        load(str(single))
    assert not torch.equal(load(str(single), check=False)["weight"], small_state()["weight"])


def test_every_byte_of_the_data_in_a_file_of_torch_counts(path: Path) -> None:
    torch.save(small_state(), path)
    assert verify(str(path)).kind == "torch.save"
    assert verify(str(path)).origin is None
    with zipfile.ZipFile(path) as archive:
        spans = {i.filename: (i.header_offset, i.file_size) for i in archive.infolist()}
    data, counted = path.read_bytes(), 0
    for name, (offset, nbytes) in spans.items():
        start = offset + 30 + len(name) + int.from_bytes(data[offset + 28 : offset + 30], "little")
        for position in range(start, start + nbytes):
            path.write_bytes(flip(data, position))
            with pytest.raises(CorruptCheckpointError):
                verify(str(path))
            counted += 1
    assert counted > 200


@pytest.mark.parametrize("damage", [flip, truncate])
def test_damage_of_foreign_headers_is_never_another_error(path: Path, damage: Damage) -> None:
    torch.save(torch.ones(1), path)
    missed = undetected(path, path, damage)
    assert (missed == []) == (damage is truncate)


@pytest.mark.parametrize("kind", ["single", "sharded"])
@pytest.mark.parametrize("act", [describe, verify, load])
def test_a_newer_format_says_upgrade(
    kind: str,
    act: Callable[[str], object],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "VERSION", 2)
        path = request.getfixturevalue(kind)
    with pytest.raises(CheckpointError, match=r"newer lightning_dist.*upgrade") as error:
        act(str(path))
    assert not isinstance(error.value, CorruptCheckpointError)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\5\6" + bytes(18)], ids=repr)
def test_what_is_no_checkpoint_is_called_so(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        verify(str(path))


def test_other_zips_and_folders_are_no_checkpoints(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/readme", "hello")
    with pytest.raises(CorruptCheckpointError, match=r"not a file of torch\.save"):
        verify(str(tmp_path / "x.zip"))
    with pytest.raises(CorruptCheckpointError, match="no manifest"):
        verify(str(tmp_path))
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(CorruptCheckpointError, match="not one of lightning_dist"):
        verify(str(tmp_path))


def test_nothing_is_a_missing_file(path: Path) -> None:
    for act in (describe, verify, load):
        with pytest.raises(FileNotFoundError):
            act(str(path))


def test_descriptions(tmp_path: Path) -> None:
    write_file(tmp_path / "single", small_state(), origin(5))
    write_folder(folder_saves(tmp_path / "sharded", small_state(), 2, step=6))
    single, sharded = (describe(f"{tmp_path}/{name}") for name in ("single", "sharded"))
    assert (single.kind, single.origin) == ("single", origin(5))
    assert single.nbytes == (tmp_path / "single").stat().st_size
    assert (sharded.kind, sharded.origin) == ("sharded", origin(6, ranks=2))
    sizes = [f.stat().st_size for f in (tmp_path / "sharded").iterdir() if f.suffix == ".bin"]
    assert sharded.nbytes == sum(sizes)


def test_a_file_of_an_old_torch_is_foreign(path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert verify(str(path)).kind == "torch.save"
    assert torch.equal(load(str(path))["weight"], torch.ones(3))
