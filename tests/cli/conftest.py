"""Folders of checkpoints for the program."""

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from cli_saves import save_file, save_folder, save_sharded


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://cli-{os.urandom(4).hex()}"
    fsspec.filesystem("memory").makedirs(url, exist_ok=True)
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """One of every kind, and one that is cut off."""
    folder = tmp_path / "mixed"
    save_file(folder / "a.ckpt", step=10)
    save_sharded(folder / "b.ckpt", step=20, ranks=3)
    (tmp_path / "model.pt").write_bytes(b"x" * 12)
    save_folder(folder / "c", tmp_path / "model.pt", step=30)
    torch.save({"w": torch.ones(3)}, folder / "foreign.ckpt")
    cut = Path(save_file(folder / "cut.ckpt", step=40))
    os.truncate(cut, cut.stat().st_size - 100)
    (folder / "events.out").write_text("not a checkpoint")
    return folder
