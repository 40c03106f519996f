"""No change of a checkpoint goes unseen, whichever byte it is."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from snapshots import folder_saves, origin, small_state, write_file, write_folder

from lightning_dist.checkpoint.disk import manifest as manifests
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.verify import describe, verify
from lightning_dist.checkpoint.reading import load

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
