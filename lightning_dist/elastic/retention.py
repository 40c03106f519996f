"""The newest checkpoints of a run: written in the background, and only as many kept as wanted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.disk.scan import checkpoints, newest_valid, saved_by
from lightning_dist.checkpoint.disk.storage import storage_of
from lightning_dist.checkpoint.saves import Saves
from lightning_dist.ranks.agreement import Membership
from lightning_dist.settings.run import CheckpointSettings

_PATIENCE = 5.0
"""Seconds that a failed process waits for its checkpoints: the next one waits for their writer."""


class Retention:
    """Saves, and keeps the newest ``keep`` that are durable.

    Removes only what its own run has saved under its present name, and only when something newer
    is durable, so that failed saves count for nothing.

    Args:
        folder: a path or URL that all ranks see.
        keep: how many stay.
        settings: how they are taken and written.
        members: all ranks; with ``members.writers`` each writes its part.
        warn: called on the leader with a message for the user.
        committed: called on the leader for each durable checkpoint.
        patience: seconds to wait for a trainer that writes there and may be about to end.
    """

    def __init__(
        self,
        folder: str,
        *,
        keep: int,
        settings: CheckpointSettings,
        members: Membership,
        warn: Callable[[str], None],
        committed: Callable[[Committed], None],
        patience: float = 0.0,
    ) -> None:
        self._folder, self._keep, self._settings = folder, keep, settings
        self._members, self._warn, self._committed = members, warn, committed
        writer = Checkpointer(settings, group=members.writers, ranks=members.world_size)
        writer.patience = patience
        writes = members.ranks.is_leader or members.writers is not None
        self.saves = Saves(writer, ranks=members.ranks, writes=writes, warn=warn, ended=self._ended)
        self._ledger: list[str] = []  # durable checkpoints of this run, the oldest first

    def move(self, members: Membership, *, run: str, restricted: bool) -> None:
        """Go on with other ranks, maybe under another leader, which opens the folder when it saves.

        Args:
            run: whose checkpoints these are.
            restricted: see :meth:`save_for`.
        """
        self._members = members
        self.saves.move(members.ranks)
        if members.ranks.is_leader:
            self.save_for(run, restricted=restricted, resumed=None)

    @property
    def checkpointer(self) -> Checkpointer:
        """Writer of this rank, idle on ranks that do not write."""
        return self.saves.checkpointer

    def open(self) -> str | None:
        """Become the one trainer of the folder; the newest complete checkpoint in it. Collective.

        Raises:
            ValueError: another trainer writes there, it cannot be written, or somebody else's
                checkpoints are in it.
            CheckpointError: there are checkpoints, and none is complete.
        """
        # A writer of the dead may have one to finish.
        self.saves.open(self._folder, together=self._members.writers is not None)
        newest: str | None = self._members.ranks.on_first(lambda: {"path": self._find()})["path"]
        return newest

    def _find(self) -> str | None:
        newest = newest_valid(self._folder, check=self._settings.verify != "never")
        if newest is not None:
            return newest.path
        for other in checkpoints(self._folder):
            if other.description is not None and other.description.origin is None:
                raise ValueError(not_ours(other.path))
        return None

    def save_for(self, run: str, *, restricted: bool, resumed: str | None) -> None:
        """Be ``run``, whose checkpoints here count from now on.

        What is newer than ``resumed`` was passed over, and goes first.

        Args:
            restricted: prove at the first save that torch's restricted unpickler can read it.
        """
        self.checkpointer.run, self.checkpointer.proves_loadable = run, restricted
        if self._members.ranks.is_leader:
            saved = saved_by(run, self._folder, resumed=resumed)
            self._ledger = [checkpoint.path for checkpoint in saved]

    def begin(self, name: str) -> str | None:
        """Path for a save under ``name``; None: ``on_busy`` says to skip it. Collective.

        Raises:
            CheckpointError: an earlier one has failed, on all ranks.
        """
        self.saves.open(self._folder, together=self._members.writers is not None)
        leader = self._members.ranks.leader
        path = self._free_path(name) if self._members.ranks.is_leader else ""
        failures, by_rank = self.saves.agree({"path": path})
        self.saves.report(failures)
        return None if self.saves.skips(by_rank) else str(by_rank[leader]["path"])

    def _free_path(self, name: str) -> str:
        """A path in the folder where nothing is that this run did not write."""
        stem, suffix = os.path.splitext(f"{self._folder.rstrip('/')}/{name}")
        for version in itertools.count():
            path = f"{stem}-v{version}{suffix}" if version else f"{stem}{suffix}"
            storage, inside = storage_of(path)
            is_own = path in self._ledger or self.checkpointer.is_pending(path)
            if is_own or not storage.exists(inside):
                break
        return path

    def collect(self) -> None:
        """Take note of what became of saves since the last call."""
        if self._settings.on_error == "warn" and self._members.ranks.is_leader:
            self.saves.report_own()
        else:  # all ranks will raise what failed
            self.saves.poll()

    def _ended(self, event: Committed | Failed) -> None:
        if isinstance(event, Committed) and self._members.ranks.is_leader:
            self._keep_newest(event.target)
            self._committed(event)

    def _keep_newest(self, path: str) -> None:
        ledger = [*(older for older in self._ledger if older != path), path]
        self._ledger = ledger[-self._keep :]
        for older in ledger[: -self._keep]:
            self.checkpointer.remove(older)

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failure for all ranks to raise."""
        return self.saves.has_to_raise

    def agree_on_failures(self) -> None:
        """Let all ranks know what could not be written. Collective.

        Raises:
            CheckpointError: something could not, on all ranks.
        """
        failures, _ = self.saves.agree({})
        self.saves.report(failures)

    def is_saved_within(self, seconds: float | None) -> bool:
        """Wait for what this rank writes, for so long; whether all of it is durable."""
        try:
            self.checkpointer.wait(seconds)
            self.collect()
            self.checkpointer.wait(seconds)  # for removals
        except TimeoutError:
            return False
        return True

    def close(self, *, patiently: bool) -> None:
        """Give the folder back; ``patiently``: when everything is durable."""
        limit = None if patiently else _PATIENCE
        is_saved = self.is_saved_within(limit)
        try:
            self.saves.close(limit if is_saved else 1.0)
        except (CheckpointError, TimeoutError) as error:
            if patiently:
                raise
            self._warn(f"Training ended before its checkpoints were complete: {error}")


def not_ours(path: str) -> str:
    """Message about a checkpoint without a position in the data."""
    return (
        f"{path} was not saved under ElasticRestart or ElasticLoop, so it has no sample position; "
        "use another folder; to start a Trainer's run from this checkpoint, pass fit(ckpt_path=...)"
    )
