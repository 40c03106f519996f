"""Real text that every machine has: the sources of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# `encodings` is left out because its generated tables are near copies of each other: a held-out
# one would have been seen in training.
SKIPPED_FOLDERS = frozenset(
    {"dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}
)
FILE_BREAK = b"\0"


def stdlib_files() -> list[Path]:
    """The library's `.py` files in one fixed order, so that every rank makes the same split."""
    found: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = set(inner) - SKIPPED_FOLDERS  # not walked: there may be many packages
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)


class ByteWindows(Dataset[Tensor]):
    """Windows of `context + 1` bytes that start every `stride` bytes: inputs and next bytes."""

    def __init__(self, files: list[Path], *, context: int, stride: int) -> None:
        text = FILE_BREAK.join(path.read_bytes() for path in files)
        # A bytearray, because torch does not take read-only memory without a warning.
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.bytes) - self.context - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.stride
        return self.bytes[start : start + self.context + 1].long()


class StdlibBytes(L.LightningDataModule):
    """Trains on most files and validates on whole files that were never trained on.

    Lightning puts a `DistributedSampler` into both loaders, so each rank sees its own windows.
    """

    def __init__(
        self,
        context: int = 128,
        *,
        batch_size: int = 8,
        hold_out_every: int = 20,
        val_windows: int = 256,
    ) -> None:
        super().__init__()
        if hold_out_every < 2:
            raise ValueError(f"hold_out_every must be at least 2, got {hold_out_every}")
        self.save_hyperparameters()
        self.context = context
        self.batch_size = batch_size
        self.hold_out_every = hold_out_every
        self.val_windows = val_windows

    def setup(self, stage: str) -> None:
        """Every rank reads the files itself: they are few, local and read in well under 1 s."""
        files = stdlib_files()
        held_out = files[:: self.hold_out_every]
        trained = [path for i, path in enumerate(files) if i % self.hold_out_every]
        self.train_set = ByteWindows(trained, context=self.context, stride=self.context)
        # A few windows spread over all the held-out files keep validation short.
        held_out_bytes = sum(path.stat().st_size for path in held_out)
        stride = max(self.context, held_out_bytes // self.val_windows)
        self.val_set = ByteWindows(held_out, context=self.context, stride=stride)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val_set, batch_size=self.batch_size)
