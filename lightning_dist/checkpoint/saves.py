"""Saves of a job on their way to disk; each failure is reported once on all ranks.

Lightning's and Accelerate's checkpoints stage their state in different ways. The rest is shared:
open a folder together, agree that a save may begin, hand it over, and report its outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import NamedTuple

from torch.optim import Optimizer

from lightning_dist.checkpoint.checkpointer import Checkpointer, Metrics
from lightning_dist.checkpoint.disk.folder_owner import is_owned
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.ranks.agreement import Facts, Ranks

_PATIENCE_WITH_LEADER = 60.0
"""Seconds for the leader before this one to end: one that is cut off learns late that it is out."""


class Failure(NamedTuple):
    """A save or a file operation that failed."""

    target: str
    message: str
    fatal: bool
    """Whether a checkpoint is missing that the disk did not take."""


class Saves:
    """The saves of this rank.

    Args:
        checkpointer: takes and writes them; it stays idle on ranks that do not write.
        ranks: that save together.
        writes: whether this rank writes. One that becomes the leader does.
        warn: warns the user, on the ranks that do.
        ended: called with every event, before failures are reported.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        ranks: Ranks,
        writes: bool = True,
        warn: Callable[[str], None],
        ended: Callable[[Committed | Failed], None] = lambda event: None,
    ) -> None:
        self.checkpointer, self.ranks, self.writes = checkpointer, ranks, writes
        self._settings, self._warn, self._ended = checkpointer.settings, warn, ended
        self._opened: set[str] = set()  # on all ranks
        self._optimizers: list[Optimizer] = []
        self._failed: dict[str, Failed] = {}  # by save id; not reported yet
        self._reported: set[str] = set()
        self._operations = itertools.count()  # that failed: they have no id
        self.blocking: dict[str, float] = {}
        """Milliseconds for which the last save to each path has blocked training."""

    @property
    def metrics(self) -> Metrics:
        """Cost of checkpoints on this rank."""
        return self.checkpointer.metrics

    @property
    def last_committed(self) -> Committed | None:
        """The newest checkpoint that is durable; on a rank that writes."""
        return self.checkpointer.last_committed

    @property
    def has_to_raise(self) -> bool:
        """Whether this rank knows of a failure that :meth:`report` would raise."""
        raises = self._settings.on_error == "raise"
        return raises and any(map(_is_fatal, self._failed.values()))

    def open(self, folder: str, *, together: bool) -> None:
        """Become the one trainer that writes to ``folder``. Collective.

        Args:
            together: all ranks write to it; otherwise only rank 0.

        Raises:
            ValueError: on all ranks, if it cannot be written to by this job, or some do not see it.
        """
        if folder not in self._opened:
            self.ranks.on_first(lambda: self.open_here(folder))
            if together:
                self.ranks.all({}, error=self._try_to_join(folder))
            self._opened.add(folder)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Call :meth:`.Checkpointer.watch` for these optimizers; on a later leader too."""
        before, self._optimizers = self._optimizers, list(optimizers)
        if self.writes and [*map(id, before)] != [*map(id, self._optimizers)]:
            self.checkpointer.wait_for_copy()
            self.checkpointer.watch(self._optimizers)

    def move(self, ranks: Ranks) -> None:
        """Save with other ranks, whose leader writes. Folders are opened again when next used."""
        self.ranks = ranks
        self._opened.clear()
        self.checkpointer.ranks = ranks.count
        if ranks.is_leader and not self.writes:
            self.writes = True
            self.checkpointer.patience = _PATIENCE_WITH_LEADER
            self.checkpointer.watch(self._optimizers)

    def open_here(self, folder: str) -> Facts:
        """Own ``folder`` on rank 0, or write to what rank 0 owns. No facts.

        Raises:
            ValueError: it cannot be written to.
        """
        try:
            self.checkpointer.open(folder)
        except (ValueError, OSError, CheckpointError) as error:
            raise ValueError(cannot_open(folder, error)) from error
        return {}

    def _try_to_join(self, folder: str) -> ValueError | None:
        if not is_owned(folder):
            return ValueError(
                f"Rank {self.ranks.rank} does not see rank 0's {folder}, to which all ranks write; "
                "put it on a filesystem that all hosts mount"
            )
        try:
            self.open_here(folder)
        except ValueError as error:
            return error
        return None

    def poll(self) -> None:
        """Take outcomes of saves since the last call. Failures are kept until they are reported."""
        for event in self.checkpointer.poll():
            self._ended(event)
            save_id = "" if event.origin is None else event.origin.save_id
            if isinstance(event, Failed) and save_id not in self._reported:
                self._failed[save_id or f"{event.target} {next(self._operations)}"] = event

    def await_turn(self) -> Exception | None:
        """Wait until a save may begin, unless it would be skipped; the reason if it is stuck.

        Not raised: the others have to know before they wait for this rank.
        """
        if self.writes and self._settings.on_busy == "wait":
            try:
                self.checkpointer.wait_for_turn()
            except Exception as error:
                return error
        return None

    def take(self, *, fatal: bool = False) -> dict[str, Failure]:
        """Failures of this rank that are not reported yet, and are now.

        Args:
            fatal: only of checkpoints that the disk did not take.
        """
        last = self.last_committed
        taken = {
            key: Failure(event.target, _failure(event, last), _is_fatal(event))
            for key, event in self._failed.items()
            if _is_fatal(event) or not fatal
        }
        self._failed = {key: e for key, e in self._failed.items() if key not in taken}
        self._reported |= taken.keys()
        return taken

    def agree(
        self, facts: Facts, *, error: Exception | None = None
    ) -> tuple[list[Failure], list[Facts]]:
        """Failures on all ranks that are not reported yet, and facts of each. Collective.

        The lowest rank that knows of a failure says it; others may learn of it later.

        Args:
            facts: JSON-able, of this rank; ``"busy"`` and ``"failed"`` are added.
            error: why this rank cannot go on. Then all raise, and failures wait.
        """
        self.poll()
        mine = {**facts, "busy": self.checkpointer.busy}
        by_rank = self.ranks.all({**mine, "failed": {} if error else self.take()}, error=error)
        found: dict[str, Failure] = {}
        for of_rank in by_rank:
            found = {key: Failure(*each) for key, each in of_rank["failed"].items()} | found
        self._reported |= found.keys()
        return list(found.values()), by_rank

    def skips(self, by_rank: Iterable[Facts], *, step: str = "") -> bool:
        """Whether a save would wait on some rank, and the user prefers to skip it; says so.

        Args:
            by_rank: what :meth:`agree` returned.
            step: of the training, as in ``" at step 3"``.
        """
        if self._settings.on_busy == "wait" or not any(facts["busy"] for facts in by_rank):
            return False
        self.metrics.skipped += 1
        self._warn(f"No checkpoint{step}: an earlier one is still being written (on_busy='skip')")
        return True

    def report_own(self) -> None:
        """Report what has failed on this rank, whatever the others know.

        Raises:
            CheckpointError: see :meth:`report`.
        """
        self.poll()
        self.report(self.take().values())

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save of this rank is committed or has failed, and report that.

        Raises:
            CheckpointError: see :meth:`report`.
            TimeoutError: after ``timeout`` seconds.
        """
        self.checkpointer.wait(timeout)
        self.report_own()

    def close(self, timeout: float | None = None) -> None:
        """Wait, report, and end the writer.

        Raises:
            CheckpointError: see :meth:`report`; or not all was done within ``timeout`` seconds.
        """
        try:
            self.checkpointer.close(timeout)
        finally:
            self.poll()
        self.report(self.take().values())

    def report(self, failures: Iterable[Failure]) -> None:
        """Report failures, as warnings or as one error.

        Raises:
            CheckpointError: a checkpoint is missing and ``on_error`` says so; it names them all.
        """
        failures, raises = list(failures), self._settings.on_error == "raise"
        for failure in failures:
            if not (raises and failure.fatal):
                self._warn(failure.message)
        if text := "\n".join(failure.message for failure in failures if raises and failure.fatal):
            raise CheckpointError(text)


def cannot_open(folder: str, error: Exception) -> str:
    """The message for a folder that cannot be written to."""
    kind = f"{type(error).__name__}: " if isinstance(error, OSError) else ""
    return f"No checkpoints can be written to {folder}: {kind}{error}"


def committed_line(event: Committed, *, blocking_ms: float) -> str:
    """One line for a checkpoint that is durable."""
    return (
        f"Checkpoint {PurePath(event.target).name} of step {event.origin.step} is complete: "
        f"{_size(event.total)} in {event.seconds:.2f} s; training was blocked for "
        f"{blocking_ms:.1f} ms"
    )


def _size(nbytes: int) -> str:
    try:
        from rich.filesize import decimal
    except ImportError:  # a training runs without it
        return f"{nbytes:,} bytes"
    return decimal(nbytes)


def _is_fatal(event: Failed) -> bool:
    """Whether a checkpoint is missing that the disk did not take."""
    return event.origin is not None and not event.dropped


def _failure(event: Failed, last: Committed | None) -> str:
    """The message for a checkpoint that was not written; ``last`` is the newest one that was."""
    of_step = "" if event.origin is None else f" of step {event.origin.step}"
    kept = (
        f"the last complete one is {last.target} of step {last.origin.step}"
        if last is not None
        else "none of this run is complete yet"
    )
    return f"The checkpoint {event.target}{of_step} was not written: {event.reason}; {kept}"
