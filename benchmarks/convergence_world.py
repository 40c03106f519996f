"""Starts the ranks of the convergence benchmark and passes on what they finish, as it comes.

The ranks of a world are started once and train all rows, because importing torch takes longer than
a run. If a row breaks the world (an error in a rank, a hang), it is reported with the reason and a
new world goes on with the row after it.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks.convergence_rank import DONE, READY, TIMEOUT, rank_main
from benchmarks.convergence_settings import Job, Refused, Run

_RANK_FAILED = (mp.ProcessRaisedException, mp.ProcessExitedException)
_POLL_S = 0.5
_SILENCE_S = 2 * TIMEOUT.total_seconds()  # no run takes this long: the ranks hang
_START_S = 300.0  # imports on a busy machine
_END_S = 30.0
_LONGEST_REASON = 500


class WorldFailed(RuntimeError):
    """The ranks did not even start."""


def run_jobs(
    jobs: Sequence[Job], *, world_size: int, seeds: Sequence[int]
) -> Iterator[Run | Refused]:
    """Every job with every seed, in this order; a refused job is reported once."""
    left = list(jobs)
    while left:
        finished = 0
        try:
            for result in _one_world(left, world_size=world_size, seeds=seeds):
                yield result
                finished += 1
                if isinstance(result, Refused) or finished == len(seeds):
                    left, finished = left[1:], 0
        except _Broken as broken:
            yield Refused(job=left[0], reason=f"broke: {broken}")
            left = left[1:]


class _Broken(Exception):
    """A world ended before its jobs did."""


def _one_world(
    jobs: Sequence[Job], *, world_size: int, seeds: Sequence[int]
) -> Iterator[Run | Refused]:
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (world_size, list(jobs), list(seeds), str(Path(directory) / "store"), results)
        ranks = mp.spawn(rank_main, args=arguments, nprocs=world_size, join=False)
        try:
            try:
                _next(results, ranks, within_s=_START_S, expected=READY)
            except _Broken as broken:
                raise WorldFailed(str(broken)) from None
            while (result := _next(results, ranks, within_s=_SILENCE_S)) != DONE:
                yield result
            _wait_for(ranks)
        finally:
            for process in ranks.processes:
                process.kill()  # of those that have ended this does nothing
                process.join()


def _next(results: Any, ranks: Any, *, within_s: float, expected: str | None = None) -> Any:
    """The next report of rank 0."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            result = results.get(timeout=_POLL_S)
        except queue.Empty:
            try:
                ended = ranks.join(timeout=0)
            except _RANK_FAILED as error:
                raise _Broken(_last_line(str(error))) from None
            if ended:
                raise _Broken("all ranks ended without a report") from None
            continue
        if expected is not None and result != expected:
            raise _Broken(f"expected {expected!r} first, got {result!r}")
        return result
    raise _Broken(f"no report within {within_s:.0f} s")


def _wait_for(ranks: Any) -> None:
    """Let the ranks end by themselves; all results are here, so a failure now is not one."""
    deadline = time.monotonic() + _END_S
    try:
        while time.monotonic() < deadline and not ranks.join(timeout=_POLL_S):
            pass
    except _RANK_FAILED:
        pass


def _last_line(text: str) -> str:
    """Of a traceback: what went wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_REASON] if lines else text
