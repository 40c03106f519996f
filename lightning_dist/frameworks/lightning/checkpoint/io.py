"""``Trainer(plugins=[AsyncTorchCheckpointIO()])``: asynchronous under a stock strategy."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from lightning_dist.checkpoint.checkpointer import Checkpointer, Metrics
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.reading import load
from lightning_dist.checkpoint.saves import Saves
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.private import restricted
from lightning_dist.ranks.agreement import Ranks
from lightning_dist.settings.run import CheckpointIOSettings
from lightning_dist.settings.signatures import takes


class AsyncTorchCheckpointIO(TorchCheckpointIO):
    """Writes what a strategy saves in the background: atomic, durable, with checksums.

    For a stock ``ModelCheckpoint`` or ``fabric.save``. The files are those of ``torch.save``. A
    checkpoint is removed only when a later one is durable. An error in the background is raised
    once, by the next save or at the end. :class:`~lightning_dist.AsyncCheckpoint` does all that and
    copies while training goes on.
    """

    @takes(CheckpointIOSettings)
    def __init__(self, settings: CheckpointIOSettings) -> None:
        """Check the arguments.

        Args:
            settings: each an argument of the plugin.

        Raises:
            ValueError: a setting that is out of range or cannot take effect.
        """
        self.settings = settings
        self._metrics = Metrics()  # before the first save and after the last
        self._saves: Saves | None = None
        self._alone = True

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Take a snapshot of ``checkpoint``; the file appears when it is complete.

        Raises:
            CheckpointError: an earlier save failed.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} has no meaning for {type(self).__name__}; "
                "give them in the URL or in fsspec's configuration"
            )
        if self._saves is not None:
            self._saves.report_own()
        target = os.fspath(path)
        checkpointer = self._open(os.path.dirname(target) or ".")
        # Lightning's weights alone are not enough to go on from; Fabric's users know what they do.
        alone = "pytorch-lightning_version" in checkpoint and "optimizer_states" not in checkpoint
        step = int(checkpoint.get("global_step", 0))
        checkpointer.save(checkpoint, target, step=step, resumable=not alone)
        if self.settings.snapshot == "sync":
            self.wait()

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, once everything saved before is durable."""
        self._open(os.path.dirname(path) or ".").remove(os.fspath(path))

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Load a checkpoint of any format, verified first.

        Raises:
            FileNotFoundError: nothing is there.
            CheckpointError: it is damaged, or a newer version of this package wrote it.
        """
        if is_http(path):
            return super().load_checkpoint(
                str(path), map_location, **restricted(weights_only), **kwargs
            )
        check = self.settings.verify != "never"
        return self._load(
            os.fspath(path), check=check, map_location=map_location, weights_only=weights_only
        )

    def _load(
        self, path: str, *, check: bool, map_location: Any, weights_only: bool | None
    ) -> dict[str, Any]:
        self.wait()
        state: dict[str, Any] = load(
            path, check=check, map_location=map_location, weights_only=weights_only
        )
        return state

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything saved so far is durable.

        Raises:
            TimeoutError: after ``timeout`` seconds.
            CheckpointError: a save failed.
        """
        if self._saves is not None:
            self._saves.wait(timeout)

    @property
    def last_committed(self) -> Committed | None:
        """The newest checkpoint that is durable."""
        return None if self._saves is None else self._saves.last_committed

    @property
    def metrics(self) -> Metrics:
        """Cost of checkpoints on this rank."""
        return self._metrics if self._saves is None else self._saves.metrics

    @override
    def teardown(self) -> None:
        """Wait for the last save, and end the writer."""
        saves, self._saves = self._saves, None
        if saves is not None:
            try:
                saves.close()
            finally:
                self._metrics = saves.metrics

    def _open(self, folder: str) -> Checkpointer:
        if self._saves is None:
            ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            checkpointer = Checkpointer(self.settings, ranks=ranks)
            alone = Ranks(None)  # others do not write, and this rank does not tell them
            self._saves = Saves(checkpointer, ranks=alone, warn=rank_zero.warn)
        self._saves.checkpointer.open(folder, alone=self._alone)
        return self._saves.checkpointer


def is_http(path: str | os.PathLike[str]) -> bool:
    """Whether torch.hub has to fetch it."""
    return str(path).startswith(("http:", "https:"))
