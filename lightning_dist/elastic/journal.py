"""Journal of a run over all its restarts: JSON lines that survive every process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_dist.base.log import get_logger

FINISHED = "finished"
"""The reason of an end that needs no restart."""

CHANGE = "change"
"""The event of members that have changed within the process; written by the leader."""

SAVED = "saved"
"""The event of the first durable checkpoint of a start: who finds none later begins a new run."""

_FOLDER = "elastic"
_PROGRESS = "progress"
_WIDTH = 64

log = get_logger(__name__)


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
class Summary:
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


def summarize(lines: list[dict[str, Any]], *, run_id: str) -> Summary:
    """Add up what the journal of a run says; all but ``end`` is of the leader."""
    starts = [each for each in lines if each["event"] == "start" and each.get("run_id") == run_id]
    ends = [each for each in lines if each["event"] == "end"]
    causes = []
    for before, now in pairwise(starts):
        between = [each for each in ends if before["time"] <= each["time"] < now["time"]]
        if any(each["rank"] == 0 and each["reason"] == FINISHED for each in between):
            continue  # it was over, and somebody wants more of it
        causes.append(_cause(between, before=before, now=now))
    caught_up = [each for each in lines if each["event"] == "caught_up"]
    mine = [each for each in caught_up if each.get("run_id") == run_id]
    changes = [each for each in lines if each["event"] == CHANGE and each.get("run_id") == run_id]
    return Summary(
        restarts=len(causes),
        causes=causes,
        lost_time_s=sum(each["seconds"] for each in mine),
        samples_recomputed=sum(each.get("redone") or 0 for each in starts[1:]),
        generations=len(changes),
        steps_redone=sum(each["is_redone"] for each in changes),
        recovery_s=sum(each["pause_s"] for each in changes),
        residual_norm_lost=sum(each["norm_lost"] for each in changes),
    )


def _cause(ends: list[dict[str, Any]], *, before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first reason that is not the echo of another rank's."""
    real = [each for each in ends if each.get("kind") != "echo"]
    if real:
        first = real[0]
        return f"rank {first['rank']}: {first['reason']}"
    gone = sorted(set(range(before["world_size"])) - {each["rank"] for each in ends})
    ranks = ", ".join(map(str, gone)) or "unknown"
    who = f"rank{'s' if len(gone) > 1 else ''} {ranks}"
    return f"{who} terminated without a record (SIGKILL or out of memory?)"
