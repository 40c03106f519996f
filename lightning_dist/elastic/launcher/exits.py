"""Ends of workers that are no failures, and the exit code of the launcher."""

from __future__ import annotations

import signal
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.private import give_back_restart
from lightning_dist.elastic.process.lifecycle import EXIT_LEAVE, EXIT_RESTART

log = get_logger(__name__)


_SIGNALLED = 128
"""Shells add it to the number of the signal that ended a program."""


@contextmanager
def exit_code_of_script() -> Iterator[None]:
    """End this program as the rank ended that failed first; what the launcher says is printed.

    Raises:
        SystemExit: with the exit code of a script that failed, or 128 and the number of the signal
            that ended it.
    """
    try:
        yield
    except (ChildFailedError, subprocess.CalledProcessError) as error:
        traceback.print_exception(error)
        if isinstance(error, ChildFailedError):
            # Those that had to stop because of another have failed, too.
            causes = [
                failure for failure in error.failures.values() if failure.exitcode != EXIT_RESTART
            ]
            first = min(causes or error.failures.values(), key=lambda failure: failure.timestamp)
            code = first.exitcode
        else:
            code = error.returncode
        raise SystemExit(code if code > 0 else _SIGNALLED - code) from None


class PlannedStops(LocalElasticAgent):
    """An agent for which ranks that ask for a restart have not failed.

    torch's takes one of its ``max_restarts`` for every exit code but 0; only where nodes join it
    restarts for nothing. When a node is preempted, the ranks of all others stop after a checkpoint
    and ask for a restart (:data:`~lightning_dist.elastic.process.lifecycle.EXIT_RESTART`). On the
    machine that goes nothing is started again: its loss would be a failure to the others.
    """

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self._watch(worker_group)
        codes = [failure.exitcode for failure in result.failures.values()]
        if EXIT_LEAVE in codes:  # as torchrun does where it gets the signal itself
            raise SignalException("the node of this launcher is being preempted", signal.SIGTERM)
        if result.state == WorkerState.FAILED and self._is_planned(codes):
            log.info("Planned stop: its restart does not count towards max_restarts")
            give_back_restart(self)
        return result

    def _watch(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _is_planned(self, codes: Sequence[int]) -> bool:
        # One is enough: it goes when all have saved, and the agent ends those that it finds later.
        return EXIT_RESTART in codes
