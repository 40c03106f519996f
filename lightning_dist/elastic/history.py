"""Identity of a run over all restarts, and their cost."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import asdict
from typing import Any

from lightning_dist.base.shared_folder import has_token, leave_token
from lightning_dist.checkpoint.disk.scan import checkpoints
from lightning_dist.checkpoint.disk.storage import LocalStorage, storage_of
from lightning_dist.elastic.data.plan import Layout
from lightning_dist.elastic.journal import CHANGE, SAVED, Journal, Progress, Summary, summarize
from lightning_dist.elastic.progress import ElasticState
from lightning_dist.elastic.recovery.change import Change
from lightning_dist.ranks.agreement import Ranks


class RunHistory:
    """History of a run, as one process reads it and records it for the next."""

    def __init__(self) -> None:
        self._journal = Journal(None, rank=0)
        self._before: Progress | None = None
        self._to_catch_up: int | None = None
        self._given_seed: int | None = None
        self._leads, self._has_saved = True, False
        self.run_id = ""
        self.seed = 0
        self.first: Layout | None = None
        """The layout that the run began with, if it began before this process."""

    def look(self, folder: str, *, rank: int) -> None:
        """Read what earlier processes have left in ``folder``; draw a name if there is nothing."""
        self._open_journal(folder, rank=rank)
        self.run_id = self._last_start().get("run_id") or secrets.token_hex(6)

    def open(self, folder: str, *, ranks: Ranks, seed: int | None) -> None:
        """Agree on which run this is. Collective.

        Args:
            seed: of the order of the samples; None: that of the run.

        Raises:
            ValueError: not all ranks see the folder.
        """
        self._open_journal(folder, rank=ranks.rank)
        self._leads = ranks.is_leader
        facts = ranks.on_first(lambda: self._facts(seed))
        self.run_id, self.seed = facts["run_id"], facts["seed"]
        self.first = None if facts["first"] is None else Layout(**facts["first"])
        self._given_seed = seed
        # Find out now, and not when another node has to go on, that it could not.
        folder_here, token = self._journal.folder, facts["token"]
        sees = not token or (folder_here is not None and has_token(folder_here, token))
        if not all(each["sees"] for each in ranks.all({"sees": sees})):
            raise ValueError(
                f"Some ranks do not see rank 0's {folder}, so they could not resume from its "
                "checkpoints; put it on a filesystem that all nodes mount, or in an object store"
            )

    def move(self, folder: str, *, ranks: Ranks, run_id: str, seed: int) -> None:
        """Be the same run with other ranks."""
        self._journal.close()
        self._open_journal(folder, rank=ranks.rank)
        self._leads = ranks.is_leader
        self.run_id, self.seed = run_id, seed

    def _facts(self, seed: int | None) -> dict[str, Any]:
        """Leader's knowledge, for all."""
        start = self._last_start()
        self._before = self._journal.last_progress() if start else None
        return {
            "run_id": self.run_id or start.get("run_id") or secrets.token_hex(6),
            "seed": _seed(seed, start.get("seed")),
            "first": None if self._before is None else start.get("first"),  # if it did any step
            "token": "" if self._journal.folder is None else leave_token(self._journal.folder),
        }

    def _open_journal(self, folder: str, *, rank: int) -> None:
        self._folder, self._has_saved = folder, False
        storage, inside = storage_of(folder)
        self._journal = Journal(inside if isinstance(storage, LocalStorage) else None, rank=rank)

    def _last_start(self) -> dict[str, Any]:
        """Last start of the run in the folder; empty if its checkpoints have been removed."""
        last: dict[str, Any] = {}
        lines = self._journal.read()
        for line in lines:
            last = line if line["event"] == "start" else last
        saved = any(
            line["event"] == SAVED and line.get("run_id") == last.get("run_id") for line in lines
        )
        return {} if saved and not checkpoints(self._folder) else last

    def resume(self, state: ElasticState | None, *, is_own: bool) -> None:
        """Be the run that a checkpoint belongs to.

        Args:
            is_own: it was in the folder of this run; or else another run begins with it.

        Raises:
            ValueError: the checkpoint's order of samples has another seed than the user wants.
        """
        if state is None:
            return
        if self._given_seed not in (None, state.seed):
            raise ValueError(
                f"seed={self._given_seed} cannot take effect: the checkpoint has epochs in the "
                f"order of seed {state.seed}; pass that seed, or none"
            )
        self.seed = state.seed
        if is_own:
            self.run_id = state.run_id

    def start(self, state: ElasticState | None, *, first: Layout, world_size: int) -> None:
        """Write down where training goes on."""
        if not self._leads:
            return
        samples = 0 if state is None else state.total_samples
        before = self._before
        redone = None if before is None else max(before.samples - samples, 0)
        self._to_catch_up = None if before is None else before.samples
        self._journal.write(
            "start",
            run_id=self.run_id,
            seed=self.seed,
            first=asdict(first),
            world_size=world_size,
            samples=samples,
            redone=redone,
        )

    def step(self, samples: int) -> bool:
        """An optimizer step is done, of all ranks; ``samples`` so far.

        Returns whether the run has now caught up with what it had done before the restart.
        """
        if not self._leads:
            return False
        caught_up = self._to_catch_up is not None and samples > self._to_catch_up
        if caught_up:
            assert self._before is not None
            seconds = time.time() - self._before.time
            self._to_catch_up = None
            self._journal.write("caught_up", run_id=self.run_id, seconds=seconds)
        if self._to_catch_up is None:  # or else a second fault would hide what the first one cost
            self._journal.progress(samples)
        return caught_up

    def saved(self) -> None:
        """A checkpoint is durable; on the leader."""
        if not self._has_saved:
            self._has_saved = True
            self._journal.write(SAVED, run_id=self.run_id)

    def change(self, change: Change) -> None:
        """Write down who takes part from now on, within the process."""
        if self._leads:
            self._journal.write(CHANGE, run_id=self.run_id, **asdict(change))

    @property
    def summary(self) -> Summary:
        """Cost of restarts of this run so far; on the leader."""
        return summarize(self._journal.read(), run_id=self.run_id)

    def metrics(self, *, world_size: int) -> dict[str, float]:
        """``elastic/*`` for loggers, without unknown values. On the leader."""
        found = {"elastic/world_size": float(world_size)}
        if self._journal.folder is not None:
            summary = self.summary
            found["elastic/restarts"] = float(summary.restarts)
            found["elastic/samples_recomputed"] = float(summary.samples_recomputed)
            if self._to_catch_up is None:
                found["elastic/lost_time_s"] = summary.lost_time_s
            if summary.generations:
                found["elastic/generations"] = float(summary.generations)
                found["elastic/steps_redone"] = float(summary.steps_redone)
                found["elastic/recovery_s"] = summary.recovery_s
                found["elastic/residual_norm_lost"] = summary.residual_norm_lost
        return found

    def end(self, reason: str, *, is_echo: bool = False) -> None:
        """This process ends; ``is_echo``: because another one did."""
        self._journal.write("end", reason=reason, kind="echo" if is_echo else "own")

    def close(self) -> None:
        """The training is over."""
        self._journal.close()
        self._before = self._to_catch_up = None


def _seed(given: int | None, before: int | None) -> int:
    if given is not None:
        return given
    if before is not None:
        return before
    everywhere = os.environ.get("PL_GLOBAL_SEED")  # of seed_everything
    return secrets.randbits(32) if everywhere is None else int(everywhere)


def start_line(
    state: ElasticState | None, now: Layout | None, *, world_size: int, foreign: str = ""
) -> str:
    """Log line: the position where training resumes.

    Args:
        now: the layout; None where samples are not counted.
        foreign: without ``state``, the checkpoint of somebody else that training goes on from.
    """
    if state is None and foreign:
        start = f"elastic: world {world_size}, resumed from {foreign}"
    elif state is None:
        start = f"elastic: world {world_size}, fresh start"
    else:
        start = (
            f"elastic: world {state.world_size} -> {world_size}, resumed at sample "
            f"{state.total_samples:,} (epoch {state.position.epoch}, step {state.total_steps})"
        )
    if now is None:
        return start
    rest = now.global_batch % (now.world_size * now.accumulate)
    uneven = ", of unequal sizes" if rest else ""
    kind = "rank" if now.world_size == world_size else "data-parallel rank"
    passes, ranks = _counted(now.accumulate, "micro-batch"), _counted(now.world_size, kind)
    return f"{start}; global batch {now.global_batch}: {passes} on {ranks}{uneven}"


def cost_line(summary: Summary) -> str:
    """Log line: the cost of restarts and of changes within the process."""
    parts = []
    if summary.restarts:
        restarts, causes = _counted(summary.restarts, "restart"), "; ".join(summary.causes)
        parts.append(
            f"{restarts}, {summary.lost_time_s:.1f} s lost, {summary.samples_recomputed} samples "
            f"recomputed ({causes})"
        )
    if summary.generations:
        parts.append(
            f"{_counted(summary.generations, 'change')} within the process, "
            f"{summary.recovery_s:.1f} s lost, {_counted(summary.steps_redone, 'step')} repeated"
        )
    return f"elastic: {'; '.join(parts)}"


def _counted(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural}"
