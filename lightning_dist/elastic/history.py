"""History of a run over its restarts: what is written down, and what it says."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_dist.base.log import get_logger
from lightning_dist.base.shared_folder import has_token, leave_token
from lightning_dist.checkpoint.disk.scan import checkpoints
from lightning_dist.checkpoint.disk.storage import LocalStorage, storage_of
from lightning_dist.elastic.data.plan import Layout
from lightning_dist.elastic.progress import ElasticState
from lightning_dist.elastic.recovery.protocol import OutageReport
from lightning_dist.ranks.agreement import Ranks

log = get_logger(__name__)


FINISHED = "finished"
"""The reason of an end that needs no restart."""

CHANGE = "change"
"""The event of members that have changed within the process; written by the leader."""

SAVED = "saved"
"""The event of the first durable checkpoint of a start: who finds none later begins a new run."""

_FOLDER = "elastic"
_PROGRESS = "progress"
_WIDTH = 64


class Journal:
    """One rank's file in a folder that the ranks share, or at least keep.

    Args:
        folder: of the checkpoints; on a local or mounted filesystem. None: nothing is kept.
    """

    def __init__(
        self, folder: str | None, *, rank: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = None if folder is None else Path(folder) / _FOLDER
        """None where nothing is kept: there is no folder, or the disk has refused a line."""
        self._rank = rank
        self._clock = clock
        self._progress: int | None = None

    def write(self, event: str, **facts: Any) -> None:
        """Append one line at once. A disk that refuses it is no reason to stop training."""
        if self.folder is None:
            return
        line = {"event": event, "time": self._clock(), "rank": self._rank, **facts}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"rank-{self._rank}.jsonl"
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(handle).st_size
                is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                os.write(handle, ("\n" * is_torn + json.dumps(line) + "\n").encode())
            finally:
                os.close(handle)
        except OSError as error:
            self._give_up(error)

    def progress(self, samples: int) -> None:
        """Note how far training is; a few microseconds, at every step."""
        if self.folder is None:
            return
        record = json.dumps({"samples": samples, "time": self._clock()}).ljust(_WIDTH - 1) + "\n"
        try:
            if self._progress is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT
                self._progress = os.open(self.folder / _PROGRESS, flags, 0o666)
            os.pwrite(self._progress, record.encode(), 0)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A journal with gaps would count restarts wrong."""
        log.warning(
            "%s: %s; restarts are not recorded from now on, and loggers begin new runs. Make the "
            "folder and its files writable for all who start this training",
            error.filename or self.folder,
            error.strerror,
        )
        self.folder = None

    def last_progress(self) -> Progress | None:
        """Last position of the previous processes."""
        if self.folder is None:
            return None
        try:
            return Progress(**json.loads((self.folder / _PROGRESS).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def read(self) -> list[dict[str, Any]]:
        """All lines of all ranks, by time. Lines that a crash has cut short are left out."""
        lines: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("rank-*.jsonl")) if self.folder is not None else ():
            try:
                texts = path.read_text(errors="replace").splitlines()
            except OSError:
                continue
            for text in texts:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict) and {"event", "time", "rank"} <= line.keys():
                    lines.append(line)
        return sorted(lines, key=lambda line: line["time"])

    def close(self) -> None:
        """Give the file back."""
        if self._progress is not None:
            os.close(self._progress)
            self._progress = None


@dataclass(frozen=True)
class Progress:
    """Samples that optimizer steps had used, and when (seconds since 1970)."""

    samples: int
    time: float


@dataclass(frozen=True)
class RestartCosts:
    """Cost of the restarts of a run.

    Args:
        restarts: how often it has been started again before its end.
        causes: why, in order.
        lost_time_s: from the last step before a fault to the same step after it, added up.
        samples_recomputed: samples that were computed again.
        generations: how often members have changed within the process.
        steps_redone: steps that were taken again then.
        recovery_s: pauses for that, added up.
        residual_norm_lost: norms of the residuals of lost ranks, estimated, added up.
    """

    restarts: int = 0
    causes: list[str] = field(default_factory=list)
    lost_time_s: float = 0.0
    samples_recomputed: int = 0
    generations: int = 0
    steps_redone: int = 0
    recovery_s: float = 0.0
    residual_norm_lost: float = 0.0


def summarize(lines: list[dict[str, Any]], *, run_id: str) -> RestartCosts:
    """Add up what the journal of a run says; all but ``end`` is of the leader."""
    starts = [line for line in lines if line["event"] == "start" and line.get("run_id") == run_id]
    ends = [line for line in lines if line["event"] == "end"]
    causes = []
    for before, now in pairwise(starts):
        between = [line for line in ends if before["time"] <= line["time"] < now["time"]]
        if any(line["rank"] == 0 and line["reason"] == FINISHED for line in between):
            continue  # it was over, and somebody wants more of it
        causes.append(_cause(between, before=before, now=now))
    caught_up = [line for line in lines if line["event"] == "caught_up"]
    repeated = [line for line in caught_up if line.get("run_id") == run_id]
    changes = [line for line in lines if line["event"] == CHANGE and line.get("run_id") == run_id]
    return RestartCosts(
        restarts=len(causes),
        causes=causes,
        lost_time_s=sum(line["seconds"] for line in repeated),
        samples_recomputed=sum(line.get("redone") or 0 for line in starts[1:]),
        generations=len(changes),
        steps_redone=sum(line["is_redone"] for line in changes),
        recovery_s=sum(line["pause_s"] for line in changes),
        residual_norm_lost=sum(line["norm_lost"] for line in changes),
    )


def _cause(ends: list[dict[str, Any]], *, before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first reason that is not the echo of another rank's."""
    own_reasons = [end for end in ends if end.get("kind") != "echo"]
    if own_reasons:
        first = own_reasons[0]
        return f"rank {first['rank']}: {first['reason']}"
    silent = sorted(set(range(before["world_size"])) - {end["rank"] for end in ends})
    ranks = ", ".join(map(str, silent)) or "unknown"
    who = f"rank{'s' if len(silent) > 1 else ''} {ranks}"
    return f"{who} terminated without a record (SIGKILL or out of memory?)"


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
        if not all(fact["sees"] for fact in ranks.all({"sees": sees})):
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

    def report_outage(self, report: OutageReport) -> None:
        """Write down who takes part from now on, within the process."""
        if self._leads:
            self._journal.write(CHANGE, run_id=self.run_id, **asdict(report))

    @property
    def summary(self) -> RestartCosts:
        """Cost of restarts of this run so far; on the leader."""
        return summarize(self._journal.read(), run_id=self.run_id)

    def metrics(self, *, world_size: int) -> dict[str, float]:
        """``elastic/*`` for loggers, without unknown values. On the leader."""
        metrics = {"elastic/world_size": float(world_size)}
        if self._journal.folder is not None:
            summary = self.summary
            metrics["elastic/restarts"] = float(summary.restarts)
            metrics["elastic/samples_recomputed"] = float(summary.samples_recomputed)
            if self._to_catch_up is None:
                metrics["elastic/lost_time_s"] = summary.lost_time_s
            if summary.generations:
                metrics["elastic/generations"] = float(summary.generations)
                metrics["elastic/steps_redone"] = float(summary.steps_redone)
                metrics["elastic/recovery_s"] = summary.recovery_s
                metrics["elastic/residual_norm_lost"] = summary.residual_norm_lost
        return metrics

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


def cost_line(summary: RestartCosts) -> str:
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


def _counted(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"
