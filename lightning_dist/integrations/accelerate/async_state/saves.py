"""Saves that were handed over: what has become of them, and every failure said once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.integrations.accelerate.async_state.scratch import Scratch
from lightning_dist.integrations.accelerate.async_state.snapshot import Snapshot

log = logging.getLogger(__name__)

Failures = Mapping[str, str]
"""By save id, which is the same on all ranks."""


class Saves:
    """The saves of this rank.

    Args:
        checkpointer: writes them.
        ranks: that save together.
    """

    def __init__(self, checkpointer: Checkpointer, *, ranks: Ranks) -> None:
        self._checkpointer, self._ranks = checkpointer, ranks
        self._under_way: dict[str, tuple[str, Scratch]] = {}
        self._failures: dict[str, str] = {}  # not reported yet
        self._reported: set[str] = set()

    @property
    def targets(self) -> list[str]:
        """Where the saves that are under way will be."""
        return [target for target, _ in self._under_way.values()]

    def take_turn(self, output_dir: str | None) -> bool:
        """Whether a save may begin: wait until it may, or skip it. Collective.

        Raises:
            CheckpointError: an earlier save has failed, or is stuck, on some rank.
            ValueError: the ranks have been given different folders.
        """
        began = time.perf_counter()
        skip, busy = self._checkpointer.settings.on_busy == "skip", self._checkpointer.busy
        error: Exception | None = None
        if not skip:
            try:
                self._checkpointer.wait_for_turn()
            except Exception as raised:  # the others must know before they wait for this rank
                error = raised
        queue_s = time.perf_counter() - began
        mine = {"busy": busy, "failures": self.collect(), "output_dir": output_dir}
        facts = self._ranks.all(mine, error=error)
        self.report(fact["failures"] for fact in facts)
        if len({fact["output_dir"] for fact in facts}) > 1:
            names = ", ".join(f"rank {r}: {f['output_dir']}" for r, f in enumerate(facts))
            raise ValueError(f"all ranks must save to the same folder, got {names}")
        if skip and any(fact["busy"] for fact in facts):
            self._checkpointer.metrics.skipped += 1
            if self._ranks.rank == 0:
                log.warning("not saving: the save before is still being written (on_busy='skip')")
            return False
        self._checkpointer.metrics.queue_s = queue_s
        return True

    def begin(self, snapshot: Snapshot, target: str, *, step: int) -> None:
        """Have ``snapshot`` written. Collective."""
        scratch = snapshot.scratch
        scratch.hand_over(os.path.dirname(target))
        save_id = self._checkpointer.save_files(
            snapshot.files, target, step=step, scratch=scratch.path
        )
        self._under_way[save_id] = target, scratch

    def collect(self) -> Failures:
        """Give the memory of what has ended back; what has failed and was not reported yet."""
        for event in self._checkpointer.poll():
            if event.origin is None:
                log.warning("%s could not be removed: %s", event.target, event.reason)
                continue
            save_id = event.origin.save_id
            _, scratch = self._under_way.pop(save_id)
            scratch.remove()
            if not isinstance(event, Committed) and save_id not in self._reported:
                self._failures[save_id] = f"{event.target} was not saved: {event.reason}"
        return self._failures

    def report(self, of_ranks: Iterable[Failures]) -> None:
        """Say what has failed on these ranks; the first one that knows of it says most.

        Raises:
            CheckpointError: something has, and ``on_error`` says so.
        """
        reasons: dict[str, str] = {}
        for failures in of_ranks:
            reasons = {**failures, **reasons}
        self._failures = {}
        self._reported |= reasons.keys()  # other ranks may learn of the same failure later
        if reasons:
            self.complain(CheckpointError("; ".join(reasons.values())))

    def complain(self, error: CheckpointError) -> None:
        """Raise it, or warn of it, as ``on_error`` says."""
        if self._checkpointer.settings.on_error == "raise":
            raise error
        if self._ranks.rank == 0:
            log.warning("%s", error)
