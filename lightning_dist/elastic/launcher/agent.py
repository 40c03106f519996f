"""torch's agent with other starts of workers, and ends of workers that are no failures."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.launcher.forks import WorkerProcess, WorkerStarts
from lightning_dist.elastic.private import forgo_restarts, give_back_restart, handlers_from
from lightning_dist.elastic.process.lifecycle import EXIT_LEAVE, EXIT_RESTART
from lightning_dist.elastic.process.outcome import Outcome, Progress

log = get_logger(__name__)


class LauncherAgent(LocalElasticAgent):
    """An agent that restarts workers in a second, and for which planned stops are no failures.

    Workers are forks of a process that has imported what they import (:class:`.WorkerStarts`).

    torch's agent takes one of its ``max_restarts`` for every exit code but 0; only where nodes join
    it restarts for nothing. When a node is preempted, the ranks of all others stop after a
    checkpoint and ask for a restart (:data:`.EXIT_RESTART`), which costs none of them if training
    has advanced since the last one. On the machine that goes nothing is started again: its loss
    would be a failure to the others. A job whose starts fail three times at one step with one
    exception ends.
    """

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._starts, self._progress, self._is_stuck = WorkerStarts(), Progress(), False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with handlers_from(partial(WorkerProcess, starts=self._starts)):
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def run(self, *arguments: Any, **others: Any) -> RunResult:
        """Run the workers, as torch's agent does."""
        try:
            result: RunResult = super().run(*arguments, **others)
            return result
        finally:
            self._starts.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._starts.look()
        result = self._watch(worker_group)
        codes = [failure.exitcode for failure in result.failures.values()]
        if EXIT_LEAVE in codes:  # as torchrun does where it gets the signal itself
            raise SignalException("the node of this launcher is being preempted", signal.SIGTERM)
        if result.state == WorkerState.FAILED:
            outcomes = outcomes_of(result.failures.values())
            if self._is_planned(codes) and self._costs_nothing(outcomes):
                log.info("Planned stop: its restart does not count towards max_restarts")
                give_back_restart(self)
            self._end_if_stuck(outcomes)
        return result

    def _costs_nothing(self, outcomes: Sequence[Outcome]) -> bool:
        """True if a planned stop does not count towards ``max_restarts``."""
        return self._progress.advanced(outcomes)

    def _end_if_stuck(self, outcomes: Sequence[Outcome]) -> None:
        """Restart no more if that is useless."""
        if not self._is_stuck and (reason := self._progress.stuck(outcomes)):
            log.warning("launch: not restarted: %s", reason)
            forgo_restarts(self)
            self._is_stuck = True

    def _watch(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _is_planned(self, codes: Sequence[int]) -> bool:
        # One is enough: it goes when all have saved, and the agent ends those that it finds later.
        return EXIT_RESTART in codes


def outcomes_of(failures: Iterable[ProcessFailure]) -> list[Outcome]:
    """Outcomes that workers have left, by the time of their ends."""
    by_time = sorted(failures, key=lambda failure: failure.timestamp)
    outcomes = (Outcome.read(failure.message) for failure in by_time)
    return [outcome for outcome in outcomes if outcome is not None]
