"""The newest checkpoints of a folder, which rank 0 writes in the background."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.disk.scan import newest_valid, saved_by
from lightning_dist.checkpoint.disk.storage import storage_of
from lightning_dist.checkpoint.metrics import Metrics
from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.checkpoint.reading import load
from lightning_dist.checkpoint.settings import CheckpointSettings

log = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds that a failed process waits for its checkpoints: the next one waits for their writer."""


class NewestFew:
    """Saves, and keeps the newest.

    Args:
        folder: a path or URL that all ranks see.
        keep: how many stay.
        settings: how they are taken and written.
        weights_only: how they are read, as of ElasticLoop.
        ranks: all of them.
    """

    def __init__(
        self,
        folder: str,
        *,
        keep: int,
        settings: CheckpointSettings,
        weights_only: bool,
        ranks: Ranks,
    ) -> None:
        self._folder, self._keep, self._settings = folder, keep, settings
        self._weights_only = weights_only
        self._ranks = ranks
        self._checkpointer = Checkpointer(settings, ranks=ranks.count) if not ranks.rank else None
        self._found: str | None = None
        self._kept: list[str] = []  # of this run, the oldest first

    @property
    def metrics(self) -> Metrics:
        """What checkpoints have cost; on rank 0."""
        return Metrics() if self._checkpointer is None else self._checkpointer.metrics

    @property
    def last_committed(self) -> Committed | None:
        """The last checkpoint that is durable; on rank 0."""
        return None if self._checkpointer is None else self._checkpointer.last_committed

    def open(self) -> str | None:
        """Become the one trainer of the folder; the newest whole checkpoint in it. Collective.

        Raises:
            ValueError: another trainer writes there, or it cannot be written.
            CheckpointError: there are checkpoints, and none is whole.
        """
        found: str | None = self._ranks.on_first(lambda: {"path": self._open()})["path"]
        return found

    def _open(self) -> str | None:
        assert self._checkpointer is not None
        self._checkpointer.open(self._folder)  # a writer of the dead may have one to finish
        newest = newest_valid(self._folder, check=self._settings.verify != "never")
        self._found = None if newest is None else newest.path
        return self._found

    def save_for(self, run: str) -> None:
        """Be ``run``: keep no more of its checkpoints, and remove no others."""
        if self._checkpointer is not None:
            self._checkpointer.run = run
            self._checkpointer.proves_loadable = self._weights_only
            own = saved_by(run, self._folder, resumed=self._found)
            self._kept = [each.path for each in own]

    def load(self, path: str) -> Any:
        """What was saved as ``path``, which has been checked. Collective.

        Raises:
            FileNotFoundError: on all ranks, if one of them does not see it.
            ValueError: on all ranks, if ``weights_only`` does not let it be read.
        """
        state, error = None, None
        try:
            state = load(path, check=False, map_location="cpu", weights_only=self._weights_only)
        except Exception as raised:
            error = raised
        self._ranks.all({}, error=error)
        return state

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """See :meth:`.Checkpointer.watch`."""
        if self._checkpointer is not None:
            self._checkpointer.watch(optimizers)

    def may_save(self) -> bool:
        """Whether a save may begin, or is skipped. Collective.

        Raises:
            CheckpointError: an earlier one has failed, on all ranks.
        """
        error = self._failure()
        busy = self._checkpointer is not None and self._checkpointer.busy
        skip = self._settings.on_busy == "skip" and busy
        if not self._ranks.all({"skip": skip}, error=error)[0]["skip"]:
            return True
        if self._checkpointer is not None:
            self._checkpointer.metrics.skipped += 1
            log.warning("no checkpoint: an earlier one is still being written (on_busy='skip')")
        return False

    def save(self, state: Any, name: str, *, step: int) -> None:
        """Save ``state`` of rank 0 under ``name`` in the folder. Collective.

        Raises:
            ValueError: on all ranks, if it cannot be saved, or no start could load it.
        """
        target = ""
        error: Exception | None = None
        try:
            if self._checkpointer is not None:
                target = self._free_path(name)
                self._checkpointer.save(state, target, step=step)
        except Exception as raised:
            error = raised
        self._ranks.all({}, error=error)
        if self._checkpointer is None:
            return
        self._kept = [*(path for path in self._kept if path != target), target]
        for path in self._kept[: -self._keep]:
            self._checkpointer.remove(path)
        self._kept = self._kept[-self._keep :]

    def _free_path(self, name: str) -> str:
        """A path in the folder where nothing is that this run did not write."""
        stem, suffix = os.path.splitext(f"{self._folder.rstrip('/')}/{name}")
        for version in itertools.count():
            path = f"{stem}-v{version}{suffix}" if version else f"{stem}{suffix}"
            storage, inside = storage_of(path)
            if path in self._kept or not storage.exists(inside):
                break
        return path

    def is_saved_within(self, seconds: float | None) -> bool:
        """Wait for what this rank writes, for so long; whether all of it is durable."""
        if self._checkpointer is not None:
            try:
                self._checkpointer.wait(seconds)
            except TimeoutError:
                return False
        return True

    def settle(self) -> None:
        """Everything is durable, or has failed. Collective.

        Raises:
            CheckpointError: something has, on all ranks.
        """
        self._ranks.all({}, error=self._failure())

    def close(self, *, patiently: bool) -> None:
        """Give the folder back; ``patiently``: when everything is durable."""
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.close(None if patiently else _PATIENCE)
        except (CheckpointError, TimeoutError) as error:
            if patiently:
                raise
            log.warning("the training ends before its checkpoints are complete: %s", error)

    def _failure(self) -> CheckpointError | None:
        """What has failed since the last call and is to be raised."""
        if self._checkpointer is None:
            return None
        failed = [each for each in self._checkpointer.poll() if not isinstance(each, Committed)]
        errors = []
        for each in failed:
            if each.origin is not None and self._settings.on_error == "raise":
                errors.append(f"{each.target} was not saved: {each.reason}")
            else:
                log.warning("%s: %s", each.target, each.reason)
        return CheckpointError("; ".join(errors)) if errors else None
